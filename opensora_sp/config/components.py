"""``dict(type=..., **options)``: the parts of a config that become objects, checked without being
built.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from opensora_sp.components import check_methods, component_class
from opensora_sp.diffusion import IDDPM, RectifiedFlow

from .findings import together

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
    """Check ``type``, a known class or an importable one, and the options against the constructor's
    arguments.
    """
    name, options = split_type(key, value)
    cls = component_class(key, name, known)
    check_options(key, name, options, cls)
    options = check_values(key, options, cls)
    if protocol is not None:
        check_methods(key, cls, protocol)
    elif dataclasses.is_dataclass(cls):
        build_component({"type": name, **options}, known)  # checks itself
    return {"type": name, **options}


def check_options(key: str, name: str, options: dict[str, Any], cls: Any) -> None:
    """Raise ValueError unless the class takes these options, and needs no others."""
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    unknown = (
        [] if takes_any else [option for option in options if option not in [p.name for p in named]]
    )
    missing = [
        p.name for p in named if p.default is inspect.Parameter.empty and p.name not in options
    ]
    together(
        *(_unknown(f"{key}.{option}", option, [p.name for p in named]) for option in unknown),
        *(
            f"got {key} of type {name!r} without {option!r}; expected a value; set {key}.{option}"
            for option in missing
        ),
    )


def check_values(key: str, options: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options converted to the types that the class annotates its arguments with."""
    try:
        hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
    except (
        NameError
    ):  # a class of the user's, annotated with names that only a type checker imports
        hints = {}
    checked, found = dict(options), []
    for option, value in options.items():
        try:
            checked[option] = (
                TypeAdapter(hints[option]).validate_python(value) if option in hints else value
            )
        except ValidationError as error:
            found.append(
                f"got {key}.{option} = {value!r}; {error.errors()[0]['msg']}; change {key}.{option}"
            )
    together(*found)
    return checked


def check_keys(key: str, options: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for options that are none of the known ones."""
    together(
        *(_unknown(f"{key}.{option}", option, known) for option in options if option not in known)
    )


def build_component(value: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build what ``dict(type=..., **options)`` describes."""
    name, options = split_type("component", value)
    return component_class("component", name, known)(**options)


def _unknown(key: str, option: str, known: list[str]) -> str:
    close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]!r}?" if close else "remove it"
    return f"got the unknown key {key!r}; expected one of {known}; {advice}"
