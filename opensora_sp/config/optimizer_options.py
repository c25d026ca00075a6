"""Elementwise optimizers of torch, by name.

ZeRO gives each rank a flat range of the numbers of every parameter, so an optimizer is exact under
ZeRO only if it updates each number from the history of that number's own gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired

import torch
from pydantic import ConfigDict, Field, model_validator

from opensora_sp.common.importing import nearest

from .components import check_types
from .sections import Strict


@dataclass(frozen=True)
class State:
    """State that an optimizer keeps of a parameter, by the names in torch's ``state_dict``.

    Attributes:
        moments: tensors of the parameter's shape, in fp32.
        added: option -> the moment that it adds, unless the option is zero or False.
        scalars: single numbers.
    """

    moments: tuple[str, ...]
    added: Mapping[str, str] = field(default_factory=dict)
    scalars: tuple[str, ...] = ("step",)


ADAM = State(("exp_avg", "exp_avg_sq"), added={"amsgrad": "max_exp_avg_sq"})
STATES = {
    "AdamW": ADAM,
    "HybridAdam": State(ADAM.moments),
    "Adam": ADAM,
    "Adamax": State(("exp_avg", "exp_inf")),
    "NAdam": State(ADAM.moments, scalars=("step", "mu_product")),
    "RAdam": State(ADAM.moments),
    "SGD": State((), added={"momentum": "momentum_buffer"}, scalars=()),
    "RMSprop": State(
        ("square_avg",), added={"momentum": "momentum_buffer", "centered": "grad_avg"}
    ),
    "Adagrad": State(("sum",)),
    "Adadelta": State(("square_avg", "acc_delta")),
}
# By a part of its name in lower case, why an optimizer is refused.
REFUSED = {
    "bit": "bitsandbytes needs a GPU, and rounds moments in blocks, which shards would cut",
    "muon": "it multiplies whole matrices",
    "shampoo": "it multiplies whole matrices",
    "adafactor": "its second moments are means over rows and columns",
    "lamb": "its step depends on the norm of a whole layer",
    "lbfgs": "it needs products of whole gradients, and several losses for a step",
}
# Declared by ``Optimizer``, or of how torch computes a step, which the plugin decides.
NOT_OPTIONS = {
    *("self", "params", "lr", "weight_decay"),
    *("capturable", "differentiable", "foreach", "fused"),
}


class Optimizer(Strict):
    """An elementwise optimizer of torch, with the options of its class.

    ``HybridAdam`` is ColossalAI's fused Adam, for CUDA. Its options are AdamW's numbers. Numbers
    that are not set have torch's defaults, except ``lr`` and ``weight_decay``.
    """

    model_config = ConfigDict(extra="allow")

    type: str = "AdamW"
    """AdamW, Adam, Adamax, NAdam, RAdam, SGD, RMSprop, Adagrad or Adadelta of torch, or
    ColossalAI's HybridAdam on CUDA. Other keys are options of the class, such as `betas`."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate after warm-up."""

    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled in AdamW, and relative to the learning rate, else as in the class."""

    @model_validator(mode="before")
    @classmethod
    def _options_of_class(cls, values: Any) -> Any:
        """Check the options against the class, and add its default numbers."""
        if not isinstance(values, dict):
            return values
        name = values.get("type", "AdamW")
        _check_name(name)
        defaults = _defaults(str(name))
        declared = {key: values[key] for key in values if key in cls.model_fields}
        options = {key: values[key] for key in values if key not in declared}
        types = dict.fromkeys(cls.model_fields, NotRequired[Any])
        types |= {key: NotRequired[_type_of(default)] for key, default in defaults.items()}
        options = check_types("optimizer", options, types)

        # Written out, so that a resumed run does not depend on the defaults of another torch.
        numbers = {key: defaults[key] for key in defaults if not isinstance(defaults[key], bool)}
        return declared | numbers | options

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the class after the parameters."""
        return self.model_dump(exclude={"type"})

    @property
    def moments(self) -> tuple[str, ...]:
        """The tensors of each parameter's shape that the optimizer keeps."""
        state, options = STATES[self.type], self.options
        added = [moment for option, moment in state.added.items() if options.get(option)]
        return (*state.moments, *added)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The single numbers that the optimizer keeps of each parameter."""
        return STATES[self.type].scalars


def _check_name(name: Any) -> None:
    """Raise ValueError unless a name belongs to an elementwise optimizer."""
    name = str(name)
    if name in STATES:
        return
    reasons = [reason for part, reason in REFUSED.items() if part in name.lower()]
    because = f" ({reasons[0]})" if reasons else ""
    raise ValueError(
        f"got optimizer.type {name!r}{because}; expected an elementwise optimizer, since ZeRO "
        f"gives each rank a flat range of a parameter's numbers: {list(STATES)}; "
        f"{nearest(name, STATES)}"
    )


def _defaults(name: str) -> dict[str, Any]:
    """The options of a class with their defaults: numbers, pairs of numbers and booleans."""
    # HybridAdam cannot be imported without CUDA.
    cls = torch.optim.AdamW if name == "HybridAdam" else getattr(torch.optim, name)
    defaults = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        is_number = not isinstance(parameter.default, bool)
        if key not in NOT_OPTIONS and (is_number or name != "HybridAdam"):
            defaults[key] = parameter.default
    return defaults


def _type_of(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    return tuple[float, float] if isinstance(default, tuple) else float
