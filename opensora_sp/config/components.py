"""Components, ``dict(type=..., **options)``: sections of a config that become objects."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from opensora_sp.components import check_methods, component_class
from opensora_sp.diffusion import IDDPM, RectifiedFlow

from .findings import raise_together

SCHEDULERS: dict[str, Any] = {"rflow": RectifiedFlow, "iddpm": IDDPM}


def split_type(key: str, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """``dict(type=name, **options)`` -> (name, options)."""
    if not isinstance(value.get("type"), str):
        raise ValueError(
            f"got {key} without the name of a type; expected {key}=dict(type='...', ...); add type"
        )
    return value["type"], {k: v for k, v in value.items() if k != "type"}


def check_component(
    key: str, value: dict[str, Any], known: dict[str, Any], protocol: type | None = None
) -> dict[str, Any]:
    """Check a component's ``type`` and its options against the constructor's arguments.

    Args:
        key: the component's key in the config.
        known: classes by name; any other type is an importable name.
        protocol: whose methods the class must have.

    Returns:
        The component, its options converted to the annotated types.

    Raises:
        ValueError: for an unknown type, or options that do not fit.
    """
    name, options = split_type(key, value)
    cls = component_class(key, name, known)
    check_options(key, name, options, cls)
    options = check_values(key, options, cls)
    if protocol is not None:
        check_methods(key, cls, protocol)
    elif dataclasses.is_dataclass(cls):
        # Dataclasses check themselves, and building one loads nothing.
        build_component({"type": name, **options}, known)
    return {"type": name, **options}


def check_options(key: str, name: str, options: dict[str, Any], cls: Any) -> None:
    """Raise ValueError for options that the class does not take, or needs and does not get."""
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)

    required = [p.name for p in named if p.default is p.empty]
    raise_together(
        lambda: None if takes_any else check_keys(key, options, names),
        *(
            f"got {key} of type {name!r} without {option!r}; expected a value; set {key}.{option}"
            for option in required
            if option not in options
        ),
    )


def check_values(key: str, options: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options converted to the annotated types of the constructor's arguments.

    Raises:
        ValueError: with all values of another type.
    """
    # Custom classes may be annotated with names that only a type checker imports.
    annotated: Any = cls if dataclasses.is_dataclass(cls) else cls.__init__  # type: ignore[misc]
    try:
        hints = get_type_hints(annotated)
    except NameError:
        hints = {}

    checked: dict[str, Any] = {}
    found = []
    for option, value in options.items():
        try:
            checked[option] = TypeAdapter(hints.get(option, Any)).validate_python(value)
        except ValidationError as error:
            found.append(
                f"got {key}.{option} = {value!r}; {error.errors()[0]['msg']}; change {key}.{option}"
            )
    raise_together(*found)
    return checked


def check_keys(key: str, options: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for unknown options."""
    unknown = [option for option in options if option not in known]
    raise_together(*(_unknown(f"{key}.{option}", option, known) for option in unknown))


def build_component(value: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build the object of ``dict(type=..., **options)``."""
    name, options = split_type("component", value)
    return component_class("component", name, known)(**options)


def _unknown(key: str, option: str, known: list[str]) -> str:
    close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]!r}?" if close else "remove it"
    return f"got the unknown key {key!r}; expected one of {known}; {advice}"
