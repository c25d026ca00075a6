"""Packages that only some features need, which are extras: ``opensora-sp[NAME]`` for pip."""

from __future__ import annotations

from importlib.util import find_spec


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
