"""Components: sections ``dict(type=..., **options)`` of a config that become objects."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from opensora_sp.common.importing import check_methods, component_class, nearest
from opensora_sp.diffusion import IDDPM, RectifiedFlow
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.registry import model_class, resolve_config

from .draft import ConfigError, Draft, expected_by, is_option, raise_together

SCHEDULERS: dict[str, Any] = {"rflow": RectifiedFlow, "iddpm": IDDPM}
ALLOWED = "allow_types"


def split_type(key: str, section: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """``dict(type=name, **options)`` -> (name, options)."""
    if not isinstance(section.get("type"), str):
        raise ValueError(
            f"got {key} without the name of a type; expected {key}=dict(type='...', ...); add type"
        )
    return section["type"], {key: option for key, option in section.items() if key != "type"}


def check_overriding_types(draft: Draft) -> None:
    """Check that the command line names no class that the config files do not allow.

    A config file is code and may import what it likes. Overrides are data, and importing the module
    of a class executes that module.

    Raises:
        ValueError: for each ``type`` that would be imported, and for ``allow_types`` itself.
    """
    messages = []
    if is_option(draft.origin(ALLOWED)):
        messages.append(
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
        if is_imported and name not in allowed and is_option(draft.origin(key)):
            messages.append(
                f"got {key} {name!r} on the command line, where importing a class is not allowed; "
                f"expected a name without a module, or one of {ALLOWED} = {list(allowed)}; set "
                f"{key} in a config file, or add the class to its {ALLOWED} [{draft.origin(key)}]"
            )
    raise_together(*messages)


def check_component(
    key: str, section: dict[str, Any], known: dict[str, Any], protocol: type | None = None
) -> dict[str, Any]:
    """Check a component's ``type`` and its options against the constructor's arguments.

    Args:
        known: classes by name; any other type is an importable name.
        protocol: whose methods the class must have.

    Returns:
        The component, its options converted to the annotated types.

    Raises:
        ValueError: for an unknown type, or options that do not fit.
    """
    name, options = split_type(key, section)
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
    # Custom classes may use types unknown to pydantic: only set options are checked.
    try:
        annotated = cls if dataclasses.is_dataclass(cls) else cls.__init__
        hints = get_type_hints(annotated, include_extras=True)
    except NameError:
        # Names that only a type checker imports.
        hints = {}

    types: dict[str, Any] = {}
    takes_any = False
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind != parameter.VAR_POSITIONAL:
            is_required = parameter.default is parameter.empty
            hint = hints.get(name, Any) if name in options else Any
            types[name] = (Required if is_required else NotRequired)[hint]
    return check_types(key, options, types, extra="allow" if takes_any else "forbid")


def check_types(
    key: str,
    options: dict[str, Any],
    types: dict[str, Any],
    *,
    extra: Literal["allow", "forbid"] = "forbid",
) -> dict[str, Any]:
    """Options converted to types, each ``Required`` or ``NotRequired``.

    Raises:
        ValueError: as of ``check_options``.
    """
    # Pydantic reports all wrong options of a typed dict at once.
    config = ConfigDict(extra=extra, arbitrary_types_allowed=True, allow_inf_nan=False)
    schema = with_config(config)(TypedDict("Options", types))  # type: ignore[operator]
    try:
        checked: dict[str, Any] = TypeAdapter(schema).validate_python(options)
        return checked
    except ValidationError as error:
        messages = [_message(key, finding, options, list(types)) for finding in error.errors()]
        raise ConfigError(messages) from None


def _message(key: str, finding: Any, options: dict[str, Any], known: list[str]) -> str:
    option = finding["loc"][0]
    if finding["type"] == "extra_forbidden" and len(finding["loc"]) == 1:
        advice = nearest(option, known, otherwise="remove it")
        return f"got the unknown key '{key}.{option}'; expected one of {known}; {advice}"
    if option not in options:
        return f"got no {key}.{option}; expected a value; set it"
    got, expected = f"{key}.{option} = {options[option]!r}", expected_by(finding)
    return f"got {got}; expected {expected}; change {key}.{option}"


def build_component(section: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build the object of ``dict(type=..., **options)``."""
    name, options = split_type("component", section)
    return component_class("component", name, known)(**options)


@dataclass(frozen=True)
class ModelSpec:
    """The ``model`` section of a config, parsed: name and complete configuration.

    Attributes:
        name: class name or preset, for example "STDiT3-XL/2".
        config: the ``Config`` of the class, with the preset's values filled in.
    """

    name: str
    config: Any

    @classmethod
    def parse(cls, section: dict[str, Any]) -> ModelSpec:
        """``dict(type=name, **options)`` -> spec.

        Raises:
            ValueError: for an unknown name, an unknown option, or values that do not fit together.
        """
        name, options = split_type("model", section)
        return cls(name, resolve_config(name, **options))

    @property
    def model_class(self) -> type[ConditionedModel]:
        return model_class(self.name)

    @property
    def input_size(self) -> tuple[int, int, int] | None:
        """The latent size that position tables are made for; None for models of any size."""
        size = getattr(self.config, "input_size", None)
        return None if size is None else tuple(size)

    def with_options(self, **options: Any) -> ModelSpec:
        """The same model with some options changed."""
        return replace(self, config=replace(self.config, **options))

    def build(self) -> ConditionedModel:
        """The model with freshly initialised weights, on the current default device."""
        return self.model_class(self.config)
