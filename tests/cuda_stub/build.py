"""Compile the stub into one library, once per version of its sources and of torch.

The library stands for the CUDA runtime, the driver, cuBLAS and cuDNN. Every function that these
(and their siblings: cuSOLVER, cuFFT, NCCL ...) export and the sources do not implement becomes one
that reports its name and fails.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".pytest_cache" / "cuda_stub"
NO_COMPILER = "no C compiler"
NO_CUDA_BUILD = "torch has no CUDA build"

# What a function that is not implemented returns: the library's own "not supported".
FAILURE = {"cuda": 801, "__cuda": 801, "cu": 801, "cublas": 15, "cudnn": 3000, "nccl": 3}
FAILURE |= {"cusolver": 16, "cusparse": 10, "cufft": 16, "curand": 1}
PREFIXES = "|".join(sorted(FAILURE, key=len, reverse=True))
# The real ones answer these without a device.
LEFT_ALONE = {"ncclGetVersion", "ncclGetErrorString", "ncclGetLastError"}


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def why_not() -> str | None:
    """Why the stub cannot be built here, in the words of `.ci/allowed_skips`; None where it can."""
    if not (torch_folder() / "lib" / "libtorch_cuda.so").exists() or not headers():
        return NO_CUDA_BUILD
    return None if compiler() else NO_COMPILER


@functools.cache
def headers() -> tuple[Path, ...]:
    """The include folders of the wheels that torch's CUDA build depends on."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    found: list[Path] = []
    for folder in folders:
        found += sorted(folder.glob("*/include"))
    has_runtime = any((include / "cuda_runtime_api.h").exists() for include in found)
    return tuple(found) if has_runtime else ()


def library() -> Path:
    """The folder with libcuda.so.1, built if it is not there yet."""
    folder = CACHE / _digest()
    if folder.exists():
        return folder

    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        built = Path(work) / "built"
        built.mkdir()
        _build(built)
        try:
            built.rename(folder)
        except OSError:
            # Another process was faster; its result is the same.
            if not folder.exists():
                raise
    return folder


def _digest() -> str:
    digest = hashlib.sha256((torch_folder() / "version.py").read_bytes())
    for file in sorted([*HERE.rglob("*.[ch]"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _build(folder: Path) -> None:
    includes = [HERE / "include", HERE / "src", *headers()]
    flags = ["-std=gnu11", "-O1", "-fPIC", "-w", *(f"-I{include}" for include in includes)]
    objects = []
    for source in sorted((HERE / "src").glob("*.c")):
        objects.append(str(folder / f"{source.stem}.o"))
        _run(compiler(), *flags, "-c", str(source), "-o", objects[-1])

    missing = folder / "missing.c"
    missing.write_text(_missing_functions(_exported() - _symbols("--defined-only", *objects)))
    library = folder / "libcuda.so.1"
    link = ["-shared", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"]
    _run(compiler(), *flags, "-O0", *objects, str(missing), "-o", str(library), *link)

    # Triton links its launcher with -lcuda.
    (folder / "libcuda.so").symlink_to(library.name)


def _missing_functions(names: set[str]) -> str:
    lines = ["/* Generated: functions that the stub does not implement. */", '#include "stub.h"']
    body = "{ return stub_unknown(#name, status); }"
    lines.append(f"#define MISSING(name, status) int name(void) {body}")
    for name in sorted(names):
        prefix = re.match(PREFIXES, name)
        assert prefix is not None
        lines.append(f"MISSING({name}, {FAILURE[prefix.group()]})")
    return "\n".join(lines) + "\n"


def _exported() -> set[str]:
    """What the CUDA libraries of the wheels export, and what the driver's header declares."""
    libraries: list[str] = []
    for include in headers():
        libraries += map(str, sorted((include.parent / "lib").glob("*.so*")))
    names = _symbols("--dynamic", "--defined-only", *libraries) - LEFT_ALONE

    for header in (include / "cuda.h" for include in headers()):
        text = header.read_text() if header.exists() else ""
        names.update(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w+)\(", text))
        names.update(re.findall(r"#define cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)\b", text))
    return names


def _symbols(*arguments: str) -> set[str]:
    output = _run("nm", "--format=posix", *arguments)
    names = {line.split()[0].split("@")[0] for line in output.splitlines() if line.strip()}
    return {name for name in names if re.fullmatch(rf"({PREFIXES})[A-Z]\w*", name)}


def _run(*command: str | None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        line = " ".join(map(str, command))
        raise RuntimeError(f"cuda_stub: {line} failed:\n{done.stderr[-4000:]}")
    return done.stdout
