"""Token plans: sequence parallelism of models that attend over whole sequences, as data.

A ``TokenPlan`` names the tensors that are cut along their tokens, the modules that attend, and the
modules whose outputs are gathered. ``token_points.py`` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# The argument of an attention that has the tokens of its keys, if they are not its queries'.
CONTEXT = "encoder_hidden_states"


@dataclass(frozen=True)
class Cut:
    """The axis along which a tensor is cut to the tokens of each rank.

    Args:
        axis: the axis of the tokens.
        ndim: of the tensor; one with fewer axes has no tokens, and is left whole. None for any.
        streams: where the axis has the tokens of several streams, their names in this order.
    """

    axis: int
    ndim: int | None = None
    streams: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """What is cut, attended to and gathered in a model with full attention. Modules are given by
    dotted name; ``*`` matches one component of the name, or a part of one.

    Args:
        inputs: for each module its arguments that are cut where it is called.
        outputs: for each module its outputs that are cut, by position.
        attention: the modules that attend: every attention that they compute over cut tokens is
            distributed by heads.
        gather: for each module the axes along which its outputs are gathered, by position; None
            for one that is left.
        streams: the arguments whose tokens are cut, in the order in which a joint attention
            concatenates them.
        contexts: for each attention to another stream, which comes as ``encoder_hidden_states``,
            the name of that stream; by default it is the name of the argument.
    """

    inputs: Mapping[str, Mapping[str, Cut]]
    attention: tuple[str, ...]
    gather: Mapping[str, tuple[int | None, ...]]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    streams: tuple[str, ...] = (CONTEXT, "hidden_states")
    contexts: Mapping[str, str] = field(default_factory=dict)

    # Its modules are ordinary ones.
    names_hook_points = False

    def __post_init__(self) -> None:
        if not any(self.is_cut(stream) for stream in self.streams) or not self.gather:
            raise ValueError(
                f"got a TokenPlan that cuts {dict(self.inputs)} and gathers {dict(self.gather)}; "
                f"expected one of {self.streams} to be cut, and an output gathered; name them"
            )

    def is_cut(self, stream: str) -> bool:
        """True if the tokens of this stream are cut, not whole on every rank."""
        return any(stream in arguments for arguments in self.inputs.values())
