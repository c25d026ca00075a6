"""The checks of one host: software, devices, memory, network and environment variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
import torch

from opensora_sp.common.importing import check_colossalai
from opensora_sp.runtime.host_checks import (
    check_architectures,
    check_devices,
    check_interfaces,
    check_own_address,
    interfaces,
    shared_memory,
)
from opensora_sp.runtime.versions import ABSENT, PACKAGE, PACKAGES, versions

GB = 1e9
MIN_MEMORY, MIN_SHARED_MEMORY = 2 * GB, 1 * GB

# Variables that decide how ranks start. No secrets: they are printed.
SHOWN = re.compile(r"(NCCL|GLOO|CUDA|OMP|TORCH|OPENSORA_SP)_\w+")


@dataclass(frozen=True)
class Check:
    """One line of a report: what was checked, the facts, the verdict, and what to do."""

    name: str
    result: str
    status: Literal["ok", "warn", "FAIL"] = "ok"
    advice: str = ""

    @classmethod
    def failed(cls, name: str, message: str) -> Check:
        """A failed check, of a message "got ...; expected ...; what to do"."""
        facts, _, advice = message.partition("; ")
        return cls(name, facts.removeprefix("got "), "FAIL", advice)

    @classmethod
    def warn_if(cls, problem: bool, name: str, facts: str, advice: str) -> Check:
        """A warning with advice where there is a problem."""
        return cls(name, facts, "warn", advice) if problem else cls(name, facts)

    @classmethod
    def run(cls, name: str, facts: str, check: Callable[[], None]) -> Check:
        """The result of a check that a run makes as well: the facts, or its error."""
        try:
            check()
        except ValueError as error:
            return cls.failed(name, str(error))
        return cls(name, facts)


@dataclass
class Report:
    """All checks of one host. ``facts`` must be equal on all hosts of a run."""

    host: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    gpus: int = 0


def examine(*, trains: bool, port: int | None = None, master: str | None = None) -> Report:
    """Run all checks of this host.

    Args:
        trains: a training is to run, which needs ColossalAI.
        port: at which rank 0 would listen, if it ran here.
        master: the first host of several; None if the run stays on this host.
    """
    facts = versions()
    checks = [*_software(facts, trains=trains), *_devices(), _memory(), _shared_memory()]
    if port:
        checks.append(_port(port))

    names = [f"{name} {addresses[0]}" for name, addresses in interfaces().items() if addresses]
    checks.append(Check.run("network", ", ".join(names), check_interfaces))
    if master:
        check = partial(check_own_address, (master, 22))
        checks.append(Check.run("own address", "other hosts can reach it", check))

    checks.append(_environment())
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Report(socket.gethostname(), checks, facts, gpus)


def _software(facts: dict[str, str], *, trains: bool) -> list[Check]:
    colossalai = Check.run("ColossalAI", facts["colossalai"], check_colossalai)
    if colossalai.status == "FAIL" and not trains:
        advice = f"sampling needs none; for training {colossalai.advice}"
        colossalai = replace(colossalai, status="warn", advice=advice)

    others = sorted(set(PACKAGES) - {"colossalai"})
    python = f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    return [
        Check("opensora-sp", f"{facts['opensora-sp']} in {PACKAGE}"),
        Check("python", python),
        Check("torch", f"{facts['torch']}, built for CUDA {facts['CUDA of torch']}{_driver()}"),
        colossalai,
        Check("packages", ", ".join(f"{name} {facts[name]}" for name in others)),
        *_faster_attention(facts),
        _torchrun(),
    ]


def _faster_attention(facts: dict[str, str]) -> list[Check]:
    """On Hopper, the command to install FlashAttention-3 where it is absent."""
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if facts["flash-attn-3"] != ABSENT or not has_hopper:
        return []
    # Models are imported for this command alone.
    from opensora_sp.models.attention_table import INSTALL_FLASH3

    return [Check("flash-attn-3", f"{ABSENT}, not needed, faster on this GPU: {INSTALL_FLASH3}")]


def _torchrun() -> Check:
    torchrun, environment = shutil.which("torchrun"), Path(sys.executable).parent
    is_elsewhere = torchrun is None or Path(torchrun).parent.resolve() != environment.resolve()
    facts = f"{torchrun or 'none'} on the PATH, python in {environment}"
    advice = (
        f"activate the environment (PATH={environment}:...): colossalai run starts the first "
        "torchrun on the PATH"
    )
    return Check.warn_if(is_elsewhere, "torchrun", facts, advice)


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
    return f", NCCL {nccl}" + (f", driver {driver[0]}" if driver else "")


def _devices() -> list[Check]:
    if not torch.cuda.is_available():
        return [Check.run("devices", f"no GPU: {os.cpu_count()} CPU cores, gloo", check_devices)]
    return [_gpu(number) for number in range(torch.cuda.device_count())]


def _gpu(number: int) -> Check:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    facts = (
        f"{properties.name}, {free / GB:.1f} GB free of {total / GB:.1f}, compute "
        f"{properties.major}.{properties.minor}"
    )
    check = Check.run(f"GPU {number}", facts, partial(check_architectures, number))
    if check.status == "FAIL":
        return check
    advice = "another process uses it: see nvidia-smi"
    return Check.warn_if(free < 0.9 * total, check.name, facts, advice)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    facts = f"{memory.available / GB:.1f} GB free of {memory.total / GB:.1f}"
    advice = "end processes that use memory: loading a model alone needs more"
    return Check.warn_if(memory.available < MIN_MEMORY, "memory", facts, advice)


def _shared_memory() -> Check:
    total, free = shared_memory() or (0, 0)
    facts = f"{free / GB:.2f} GB free of {total / GB:.2f} in /dev/shm"
    advice = "docker run --shm-size=8g, or num_workers=0; NCCL needs some as well"
    return Check.warn_if(free < MIN_SHARED_MEMORY, "shared memory", facts, advice)


def _port(port: int) -> Check:
    name = f"port {port}"
    with socket.socket() as probe:
        # torch's store binds with this option, too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            advice = (
                "pass another --master_port, on one host --standalone, or end the process that "
                f"uses it: ss -ltnp 'sport = :{port}'"
            )
            return Check(name, str(error.strerror), "FAIL", advice)
    return Check(name, "free")


def _environment() -> Check:
    shown = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if SHOWN.fullmatch(name)]
    return Check("environment", ", ".join(shown) or "nothing set")
