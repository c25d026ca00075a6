"""Components, ``dict(type=..., **options)``: sections of a config that become objects."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from opensora_sp.common.importing import check_methods, component_class, nearest
from opensora_sp.diffusion import IDDPM, RectifiedFlow

from .draft import Draft
from .findings import ConfigError, expected_by, raise_together

SCHEDULERS: dict[str, Any] = {"rflow": RectifiedFlow, "iddpm": IDDPM}
ALLOWED = "allow_types"


def split_type(key: str, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """``dict(type=name, **options)`` -> (name, options)."""
    if not isinstance(value.get("type"), str):
        raise ValueError(
            f"got {key} without the name of a type; expected {key}=dict(type='...', ...); add type"
        )
    return value["type"], {k: v for k, v in value.items() if k != "type"}


def check_overriding_types(draft: Draft) -> None:
    """Check that the command line names no class that the config files do not allow.

    A config file is code and may import what it likes. Overrides are data, and importing the module
    of a class executes that module.

    Raises:
        ValueError: for each ``type`` that would be imported, and for ``allow_types`` itself.
    """
    found = []
    if _is_override(draft, ALLOWED):
        found.append(
            f"got {ALLOWED} on the command line; expected it in a config file, which decides what "
            f"may be imported; write it there [{draft.origin(ALLOWED)}]"
        )

    allowed = draft.get(ALLOWED)
    # Other values are refused later, with all that is wrong with the config.
    if not isinstance(allowed, (list, tuple)):
        allowed = ()

    for key in ("model.type", "vae.type", "text_encoder.type", "scheduler.type"):
        name = draft.get(key)
        is_imported = isinstance(name, str) and "." in name
        if is_imported and name not in allowed and _is_override(draft, key):
            found.append(
                f"got {key} {name!r} on the command line, where importing a class is not allowed; "
                f"expected a name without a module, or one of {ALLOWED} = {list(allowed)}; set "
                f"{key} in a config file, or add the class to its {ALLOWED} [{draft.origin(key)}]"
            )
    raise_together(*found)


def _is_override(draft: Draft, key: str) -> bool:
    return (draft.origin(key) or "").startswith("--")


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
    options = check_options(key, options, cls)
    if protocol is not None:
        check_methods(key, cls, protocol)
    elif dataclasses.is_dataclass(cls):
        # Dataclasses check themselves, and building one loads nothing.
        build_component({"type": name, **options}, known)
    return {"type": name, **options}


def check_options(key: str, options: dict[str, Any], cls: Any) -> dict[str, Any]:
    """The options of a component, converted to the annotated types of the constructor's arguments.

    Raises:
        ValueError: with all options that are unknown, missing, or of another type.
    """
    schema = _option_types(cls, options)
    try:
        checked: dict[str, Any] = TypeAdapter(schema).validate_python(options)
        return checked
    except ValidationError as error:
        messages = [_message(key, finding, options, schema) for finding in error.errors()]
        raise ConfigError(messages) from None


def _option_types(cls: Any, options: dict[str, Any]) -> Any:
    """The arguments of a constructor, as a ``TypedDict`` that pydantic can check.

    Only those in ``options`` have their types: custom classes may use types unknown to pydantic.
    """
    try:
        hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    except NameError:
        # Names that only a type checker imports.
        hints = {}

    types: dict[str, Any] = {}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            config["extra"] = "allow"
        elif parameter.kind != parameter.VAR_POSITIONAL:
            is_required = parameter.default is parameter.empty
            hint = hints.get(name, Any) if name in options else Any
            types[name] = (Required if is_required else NotRequired)[hint]
    return with_config(config)(TypedDict("Options", types))  # type: ignore[operator]


def _message(key: str, finding: Any, options: dict[str, Any], schema: Any) -> str:
    option, known = finding["loc"][0], list(schema.__annotations__)
    if finding["type"] == "extra_forbidden":
        advice = nearest(option, known, otherwise="remove it")
        return f"got the unknown key '{key}.{option}'; expected one of {known}; {advice}"
    if option not in options:
        return f"got no {key}.{option}; expected a value; set it"
    got, expected = f"{key}.{option} = {options[option]!r}", expected_by(finding)
    return f"got {got}; expected {expected}; change {key}.{option}"


def build_component(value: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build the object of ``dict(type=..., **options)``."""
    name, options = split_type("component", value)
    return component_class("component", name, known)(**options)
