"""Packages that only some features need, most of them extras: ``opensora-sp[NAME]`` for pip."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

# The only version whose internals the plugin knows.
COLOSSALAI = "0.5.0"


class PackageError(ImportError, ValueError):
    """A package is missing or has another version: a user's error, and one of an import."""


def is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    spec = find_spec(module)
    # A folder of this name where Python was started, as W&B makes one, has no origin.
    return spec is not None and spec.origin is not None


def check_extra(extra: str, *modules: str, setting: str, instead: str) -> None:
    """Raise ValueError if a feature was asked for, and a module that it needs is not installed.

    Args:
        extra: the name under which ``setup.py`` has their packages.
        setting: what asks for them.
        instead: how to do without them.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        raise ValueError(
            f"got {setting}, and no package {' and no '.join(missing)}; expected the extra "
            f"{extra!r} to be installed; pip install 'opensora-sp[{extra}]', or {instead}"
        )


def check_colossalai() -> None:
    """Raise PackageError unless ColossalAI is installed in the version that the plugin knows.

    It is not imported, which takes seconds.
    """
    version = _version("colossalai") if is_installed("colossalai") else None
    if version is None or version.partition("+")[0] != COLOSSALAI:
        raise PackageError(
            f"got ColossalAI {version or 'not installed'}; expected {COLOSSALAI}, which training "
            f"and SequenceParallelPlugin need; pip install --no-deps colossalai=={COLOSSALAI} && "
            "pip install 'opensora-sp[colossalai-runtime]'"
        )


def check_diffusers(minimum: tuple[int, int] = (0, 38)) -> None:
    """Raise PackageError if diffusers is not installed or older than ``minimum``."""
    version = _version("diffusers")
    if version is None or tuple(map(int, version.split(".")[:2])) < minimum:
        wanted = ".".join(map(str, minimum))
        raise PackageError(
            f"got diffusers {version or 'not installed'}; expected {wanted} or newer; "
            f"pip install 'diffusers>={wanted}'"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
