"""What Triton kernels are compiled to, for a GPU that this machine needs not have.

`builds_of` calls a function that launches kernels, on CPU tensors. Each launch is compiled for the
asked compute capability as Triton would do it on a device (dtypes, constants, divisibility by 16 of
pointers and integers), and is not run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class KernelBuild:
    """A compiled kernel.

    `registers` of a thread; `spills`, bytes of registers kept in memory, of a thread; `shared`
    memory of a program in bytes; `grid` of the launch.
    """

    name: str
    capability: int
    grid: tuple[int, ...]
    registers: int
    spills: int
    shared: int
    ptx: str
    sass: str

    def count(self, pattern: str) -> int:
        """Matches of a regular expression in the machine code."""
        return len(re.findall(pattern, self.sass))

    def check(self, *, wide_loads: bool = False, wide_stores: bool = False) -> None:
        """Assert what holds for all kernels: no spills and no atomic operations.

        `wide_loads`, `wide_stores`: 128 bits at a time, in all accesses to global memory.
        """
        who = f"{self.name} for sm_{self.capability}"
        assert self.spills == 0, f"{who} spills {self.spills} bytes of each thread"
        for word in (r"\batom\.", r"\bred\."):
            assert not re.search(word, self.ptx), f"{who} has {word} in PTX"
        assert not self.count(r"\b(ATOM|ATOMG|RED)\b"), f"{who} has atomic operations in SASS"

        for wanted, operation in ((wide_loads, "LDG"), (wide_stores, "STG")):
            wide = self.count(rf"\b{operation}\.E\.\S*128")
            if wanted:
                every = self.count(rf"\b{operation}\.")
                assert wide == every > 0, f"{who}: {wide} of {every} {operation} have 128 bits"


def builds_of(
    launch: Callable[..., Any], *args: Any, capability: int = 90, **options: Any
) -> list[KernelBuild]:
    """The kernels that `launch(*args, **options)` launches, in order, compiled."""
    builds: list[KernelBuild] = []
    compile_and_run = JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = compile_and_run(kernel, *args, grid=grid, warmup=True, **options)
        builds.append(_described(kernel, compiled, grid, capability))

    triton.runtime.driver.set_active(_AbsentDevice(capability))
    try:
        with mock.patch.object(JITFunction, "run", run):
            launch(*args, **options)
    finally:
        # Not `reset_active()`, which looks for a GPU.
        triton.runtime.driver.set_active(None)
    assert builds, "no kernel was launched"
    return builds


class _AbsentDevice:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # by which compiled kernels are kept

    def get_current_stream(self, device: int) -> int:
        return 0


def _described(
    kernel: JITFunction, compiled: Any, grid: tuple[int, ...], capability: int
) -> KernelBuild:
    resources = _cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
    return KernelBuild(
        name=kernel.fn.__name__,
        capability=capability,
        grid=tuple(grid),
        registers=_number(r"\bREG:(\d+)", resources),
        # Triton's kernels have no stack but for spilled registers.
        spills=_number(r"\bSTACK:(\d+)", resources) + _number(r"\bLOCAL:(\d+)", resources),
        shared=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
        sass=_cuobjdump(compiled.asm["cubin"], "-sass"),
    )


def _cuobjdump(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", *options, file.name]
        # It starts nvdisasm, which it looks for on the path.
        env = {"PATH": str(TOOLS)}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text}"
    return int(found[1])
