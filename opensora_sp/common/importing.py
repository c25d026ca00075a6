"""Names of classes in configs, and packages that only some features need (extras of pip)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any


def component_class(key: str, name: str, known: Mapping[str, Any]) -> Any:
    """The class of ``type=name``: one of ``known``, or an importable ``"my_package.MyClass"``.

    Args:
        key: the component's key in the config, for errors.

    Raises:
        ValueError: if it is neither.
    """
    if name in known:
        return known[name]

    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"got {key}.type {name!r}; expected one of {sorted(known)}, or a class of yours like "
            "'my_package.MyClass'; choose one of these"
        )

    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"got {key}.type {name!r}, which cannot be imported ({error}); expected "
            "'module.Class'; check the name, and that the module is installed or its folder in "
            "PYTHONPATH"
        ) from error


def check_methods(key: str, cls: Any, protocol: type) -> None:
    """Raise ValueError if a class lacks a method of a protocol."""
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(cls, name, None))]
    if missing:
        raise ValueError(
            f"got {key}.type {cls.__name__} without {', '.join(missing)}; expected the methods of "
            f"{protocol.__module__}.{protocol.__name__}; add them"
        )


def nearest(name: Any, known: Iterable[str], *, otherwise: str = "take one of these") -> str:
    """The advice for an unknown name: the nearest known one, if any is near."""
    by_lower_case = {str(candidate).lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.5)
    return f"did you mean {by_lower_case[close[0]]!r}?" if close else otherwise


# The only version whose internals the plugin knows.
COLOSSALAI = "0.5.0"


class PackageError(ImportError, ValueError):
    """A package is missing or has another version: a user's error, and one of an import."""


def is_installed(module: str) -> bool:
    """True if a module could be imported, without importing it."""
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


def check_diffusers() -> None:
    """Raise PackageError if diffusers is not installed or older than 0.38."""
    version = _version("diffusers")
    if version is None or tuple(map(int, version.split(".")[:2])) < (0, 38):
        raise PackageError(
            f"got diffusers {version or 'not installed'}; expected 0.38 or newer; "
            "pip install 'diffusers>=0.38'"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
