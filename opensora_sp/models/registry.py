"""Models by name: classes, which take their whole configuration, and presets, which fill it in."""

from __future__ import annotations

import dataclasses
from typing import Any

from opensora_sp.common.importing import component_class, nearest

from .base import ConditionedModel
from .stdit import STDiT, STDiT2
from .stdit3 import STDiT3

XL = dict(depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
CLASSES: dict[str, type[ConditionedModel]] = {cls.__name__: cls for cls in (STDiT, STDiT2, STDiT3)}
PRESETS: dict[str, tuple[type[ConditionedModel], dict[str, Any]]] = {
    "STDiT-XL/2": (STDiT, XL),
    "STDiT2-XL/2": (STDiT2, XL),
    "STDiT3-XL/2": (STDiT3, XL),
    "STDiT3-3B/2": (STDiT3, XL | dict(hidden_size=1872, num_heads=26)),
}

# The model whose blocks calibration and checks of devices measure, and its preset.
REFERENCE, REFERENCE_PRESET = "STDiT3", "STDiT3-XL/2"
# Classes and options that checks of devices run.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "STDiT": ("STDiT", {}),
    "STDiT2": ("STDiT2", dict(qk_norm=True)),
    "STDiT3": ("STDiT3", {}),
    "STDiT3 with windows": ("STDiT3", dict(kernel_size=(4, 4, -1))),
}


def has_one_size(model: type[ConditionedModel]) -> bool:
    """True if a model takes latents of one size alone, its setting ``input_size``."""
    return "input_size" in {field.name for field in dataclasses.fields(model.Config)}


def models_for_any_size() -> list[str]:
    """Classes of this package that take latents of any size."""
    return [name for name, cls in CLASSES.items() if not has_one_size(cls)]


def build_model(name: str, **config: Any) -> ConditionedModel:
    """Build a model by class name or preset; keyword arguments override the preset's.

    Raises:
        ValueError: for an unknown name, an unknown configuration key (naming the nearest known
            one), or values that do not fit each other.
    """
    return model_class(name)(resolve_config(name, **config))


def model_class(name: str) -> type[ConditionedModel]:
    """The class of this name: see ``loaded_classes``, a preset's, or "my_package.MyModel".

    Raises:
        ValueError: if there is none, or it is not derived from a model of this package.
    """
    known = {**loaded_classes(), **{preset: cls for preset, (cls, _) in PRESETS.items()}}
    if name not in known and "." not in name:
        raise ValueError(
            f"got model {name!r}; expected one of {list(known)}, or a class of yours like "
            f"'my_package.MyModel'; {nearest(name, known)}"
        )

    model = component_class("model", name, known)
    if not (isinstance(model, type) and issubclass(model, ConditionedModel)):
        raise ValueError(
            f"got model.type {name!r}, which is {model!r}; expected a class derived from one of "
            f"{list(CLASSES)}; derive it, or parallelize it by a ShardPlan (docs/custom_model.md)"
        )
    return model


def loaded_classes() -> dict[str, type[ConditionedModel]]:
    """Models by the name of their class: of this package, and derived ones.

    A derived class is known once its module has been imported. Nothing is imported here, since
    names stand in files that come with weights.
    """
    loaded, classes = dict[str, type[ConditionedModel]](), ConditionedModel.__subclasses__()
    # The list grows while it is read. A class without a configuration is a base of others.
    for cls in classes:
        classes += cls.__subclasses__()
        if hasattr(cls, "Config"):
            loaded[cls.__name__] = cls
    return {**CLASSES, **loaded, **CLASSES}


def resolve_config(name: str, **config: Any) -> Any:
    """The checked configuration that ``build_model`` would build from."""
    cls = model_class(name)
    keys = [field.name for field in dataclasses.fields(cls.Config)]
    for key in config:
        if key not in keys:
            raise ValueError(
                f"got {key!r} for model {name}; expected one of {keys}; {nearest(key, keys)}"
            )
    # A class by its name takes its whole configuration.
    preset = PRESETS[name][1] if name in PRESETS else {}
    return cls.Config(**{**preset, **config})
