"""The GPUs for which tests compile Triton's kernels, by compute capability."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _knows_blackwell() -> bool:
    """Triton 3.1, which torch 2.5 comes with, does not: see `make test-kernels-newest`."""
    try:
        return tuple(map(int, version("triton").split(".")[:2])) >= (3, 3)
    except PackageNotFoundError:
        return False


CAPABILITIES = (80, 90, 100) if _knows_blackwell() else (80, 90)
