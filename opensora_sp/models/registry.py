"""Models by name: classes, which take their whole configuration, and presets, which fill it in."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from opensora_sp.common.importing import component_class

from .base import ConditionedModel
from .stdit import STDiT
from .stdit2 import STDiT2
from .stdit3 import STDiT3

XL = dict(depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
CLASSES: dict[str, type[ConditionedModel]] = {cls.__name__: cls for cls in (STDiT, STDiT2, STDiT3)}
PRESETS: dict[str, tuple[type[ConditionedModel], dict[str, Any]]] = {
    "STDiT-XL/2": (STDiT, XL),
    "STDiT2-XL/2": (STDiT2, XL),
    "STDiT3-XL/2": (STDiT3, XL),
    "STDiT3-3B/2": (STDiT3, XL | dict(hidden_size=1872, num_heads=26)),
}


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
            f"'my_package.MyModel'; {_nearest(name, list(known))}"
        )

    found = component_class("model", name, known)
    if not (isinstance(found, type) and issubclass(found, ConditionedModel)):
        raise ValueError(
            f"got model.type {name!r}, which is {found!r}; expected a class derived from one of "
            f"{list(CLASSES)}; derive it, or parallelize it by a ShardPlan (docs/custom_model.md)"
        )
    return found


def loaded_classes() -> dict[str, type[ConditionedModel]]:
    """Models by the name of their class: those of this package, and derived ones.

    A derived class is known once its module has been imported. Nothing is imported here, since
    names stand in files that come with weights.
    """
    found, todo = dict[str, type[ConditionedModel]](), list(CLASSES.values())
    for cls in todo:
        found[cls.__name__] = cls
        todo += cls.__subclasses__()
    return {**found, **CLASSES}


def resolve_config(name: str, **config: Any) -> Any:
    """The checked configuration that ``build_model`` would build from."""
    cls = model_class(name)
    keys = [field.name for field in dataclasses.fields(cls.Config)]
    for key in config:
        if key not in keys:
            raise ValueError(
                f"got {key!r} for model {name}; expected one of {keys}; {_nearest(key, keys)}"
            )
    preset = PRESETS[name][1] if name in PRESETS else {}
    return cls.Config(**{**preset, **config})


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "take one of these"
