"""Classes named in configs: short names for those of this package, importable names for others."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
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
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise
