"""Shard plans: hook points of sequence parallelism in a model, as data.

A ``ShardPlan`` names the modules at which tokens enter, are attended to, and leave. Models written
with hook points (``models/hook_points.py``) declare them in ``sharding_points``. For any other
model a plan names ordinary modules, which ``module_points.py`` adapts to hook points.

Legend: b samples, t frames, s patches of a frame, c channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .batch_shape import alternates
from .diffusers_plans import plan_of_diffusers
from .token_plan import TokenPlan

ROWS = "rows"
TOKENS = (ROWS, "b t s c", "b (t s) c")
POINTS = ("shard", "switch", "segment", "gather", "spatial", "temporal", "tokenwise")


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The hook points of a model. Modules are given by dotted name; ``*`` matches one or more
    characters within one component of the name.

    Args:
        enter: the module where the tokens are sharded; its first argument is the tensor of all
            tokens.
        spatial, temporal: modules that attend over the patches of a frame, over the frames of a
            patch. Each takes the tokens as first argument and returns as many.
        leave: the module whose output, which has the axes of the tokens, is gathered.
        tokens: the axes of the tokens, "b t s c" or "b (t s) c"; "rows" if the modules are hook
            points (``opensora_sp.models.hook_points``), which are called with the rows they work
            on.
        placement: "stream" if the spatial and temporal modules follow each other and return the
            whole residual stream; "branch" if their output is added to tokens that bypass them.
        arguments: axes of other arguments of these modules, by name: a tensor "b t" is cut to the
            frames held by this rank, an integer "t" becomes their number. "b (t s) c" needs an
            integer argument of ``enter`` with axis "t".
        switch, segment, tokenwise: further hook points, with ``tokens="rows"`` only: where the
            layout changes, where a part of a block runs, and where it ends with work on single
            tokens.

    Raises:
        ValueError: if ``tokens``, ``placement`` or the axes of an argument are unknown, or hook
            points are missing.
    """

    enter: str
    spatial: tuple[str, ...]
    temporal: tuple[str, ...]
    leave: str
    tokens: str = "b t s c"
    placement: str = "stream"
    arguments: Mapping[str, str] = field(default_factory=dict)
    switch: tuple[str, ...] = ()
    segment: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise ValueError(
                f"got tokens {self.tokens!r}; expected one of {TOKENS}; rearrange before "
                f"{self.enter!r}"
            )
        if self.placement not in ("stream", "branch"):
            raise ValueError(
                f"got placement {self.placement!r}; expected 'stream' or 'branch'; choose one of "
                "them"
            )

        further = (self.switch, self.segment, self.tokenwise)
        if not all(further) if self.names_hook_points else any(further):
            raise ValueError(
                f"got tokens {self.tokens!r} with switch, segment, tokenwise {further}; expected "
                "modules of all three with tokens 'rows', and none otherwise; correct the ShardPlan"
            )

        for name, axes in self.arguments.items():
            if not axes or set(axes.split()) - {"b", "t", "s", "c"}:
                raise ValueError(
                    f"got axes {axes!r} for argument {name!r}; expected some of b, t, s, c; write "
                    "for example 'b t'"
                )

    @property
    def names_hook_points(self) -> bool:
        """True if the modules are hook points, not ordinary modules."""
        return self.tokens == ROWS


_PLANS: dict[type[nn.Module], ShardPlan | TokenPlan] = {}


def register_plan(model_class: type[nn.Module], plan: ShardPlan | TokenPlan) -> None:
    """Let ``parallelize``, and with it the plugin, use this plan for models of this class."""
    _PLANS[model_class] = plan


def plan_of(model: nn.Module) -> ShardPlan | TokenPlan:
    """The plan registered for the class of a model, or for a base class, or made of its
    ``sharding_points``, or of a transformer of diffusers.

    Raises:
        ValueError: if there is neither.
    """
    # A registered plan comes first, so that a derived class can be parallelized in another way.
    registered = next((_PLANS[cls] for cls in type(model).__mro__ if cls in _PLANS), None)
    if registered is not None:
        return registered

    if hasattr(model, "_cp_plan"):
        return plan_of_diffusers(model)
    named: Any = getattr(model, "sharding_points", None)
    absent = set() if alternates(getattr(model, "config", None)) else {"temporal"}
    is_named = isinstance(named, Mapping) and set(named) == set(POINTS)
    if not is_named or {name for name in named if named[name] is None} != absent:
        name = type(model).__name__
        raise ValueError(
            f"got a model of class {name} with sharding_points {named!r}; expected a dict that "
            f"names its {sorted(POINTS)} points, or a plan; call register_plan({name}, "
            "ShardPlan(...)), see docs/custom_model.md"
        )
    points: dict[str, Any] = {
        name: () if pattern is None else (pattern,) for name, pattern in named.items()
    }
    (enter,), (leave,) = points.pop("shard"), points.pop("gather")
    return ShardPlan(tokens=ROWS, enter=enter, leave=leave, **points)


def find_modules(model: nn.Module, pattern: str) -> list[Any]:
    """Modules whose dotted name matches a pattern, where ``*`` matches one or more characters
    other than dots.

    Raises:
        ValueError: if there is none.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    matches = [module for name, module in model.named_modules() if expression.fullmatch(name)]
    if not matches:
        raise ValueError(
            f"got {pattern!r} as a hook point, which matches no module of {type(model).__name__}; "
            "expected the name of one; correct its sharding_points or ShardPlan"
        )
    return matches
