"""The options of sequence parallelism, each declared once.

``Options`` holds name, default, choices and help text. The keywords of ``parallelize``, the section
``sequence_parallel`` of a config and its reference page derive from these fields.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .cost_model import H100, CostModel, Link
from .typed import Decorated

PLACEMENTS = ("stream", "branch")


def _option(default: Any, text: str, choices: tuple[str | None, ...] = ()) -> Any:
    """A field with its help text and, if these are few, its valid values."""
    metadata = {"help": text, "choices": choices, "in_config": True}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the ranks of a sequence-parallel group share a batch: the keywords of ``parallelize``.

    Each field's ``metadata["help"]`` explains it; the config reference shows these texts.

    Raises:
        ValueError: if a value is unknown or options contradict each other.
    """

    strategy: str = _option(
        "switch",
        "A parallel strategy, see below. `switch`: tokens change between spatial and temporal "
        "rows. `ulysses` (heads) and `split_gather` (all tokens) are exact baselines that send "
        "more. Or a registered one.",
    )
    placement: str = _option(
        "stream",
        "Where `switch` exchanges tokens. `stream`: the residual stream, between blocks. `branch`: "
        "the stream stays in temporal rows; the input and output of each spatial attention travel.",
        PLACEMENTS,
    )
    overlap_chunks: int | Literal["auto"] = _option(
        "auto",
        "Chunks in which the end of a block is computed; each is sent while the next is computed. "
        "1 turns this off. No chunk is empty: with 2 frames on a rank there are at most 2. `auto` "
        "takes several where this saves more time than their launches cost: between nodes, but "
        "hardly inside of one.",
    )
    overlap_backward: bool = _option(
        False,
        "With gradient checkpointing, recompute a block while its output gradient is in flight.",
    )
    recompute_communication: bool = _option(
        False,
        "With gradient checkpointing, repeat the exchanges inside of blocks in recomputation "
        "instead of keeping what was received: less memory, more communication.",
    )
    cost_model: CostModel = field(
        default=H100,
        metadata={
            "help": "Speed of the devices and of their links, by which a strategy is chosen for "
            "each shape; equal on all ranks.",
            "choices": (),
            "in_config": False,
        },
    )
    spans_nodes: bool = field(
        default=False,
        metadata={
            "help": "Whether the group of ranks lies on several nodes, so that its exchanges use "
            "the network. Taken from the current group of the mesh, whatever is passed here.",
            "choices": (),
            "in_config": False,
        },
    )
    verify: bool = _option(
        False,
        "Run the first batch with and without sequence parallelism, log the largest relative "
        "differences of output and gradients, and raise an error if they exceed rounding.",
    )

    def __post_init__(self) -> None:
        # Strategies have Options in their signatures.
        from .strategies import strategy_options

        for one in fields(self):
            value, choices = getattr(self, one.name), one.metadata["choices"]
            if one.name == "strategy":
                choices = strategy_options()
            if choices and value not in choices:
                raise ValueError(
                    f"got {one.name} {value!r}; expected one of {choices}; choose one of these"
                )

        chunks = self.overlap_chunks
        if chunks != "auto" and (isinstance(chunks, str) or chunks < 1):
            raise ValueError(
                f"got overlap_chunks {chunks}; expected at least 1, or 'auto'; 1 turns chunks off"
            )
        if self.placement == "branch" and self.strategy != "switch":
            raise ValueError(
                f"got placement 'branch' with strategy {self.strategy!r}; expected strategy "
                "'switch'; change either"
            )
        if self.overlaps and (self.strategy, self.placement) != ("switch", "stream"):
            raise ValueError(
                f"got overlap_chunks {self.overlap_chunks} and overlap_backward "
                f"{self.overlap_backward} with strategy {self.strategy!r} and placement "
                f"{self.placement!r}; expected 'switch' and 'stream', where switches lie between "
                "blocks; change these or leave the overlap out"
            )

    @property
    def link(self) -> Link:
        """What carries the exchanges of the group of ranks."""
        return self.cost_model.link(spans_nodes=self.spans_nodes)

    @property
    def num_chunks(self) -> int:
        """``overlap_chunks``, where "auto" has not been replaced by a number: 1."""
        return 1 if isinstance(self.overlap_chunks, str) else self.overlap_chunks

    @property
    def overlaps(self) -> bool:
        """Whether any exchange overlaps with computation."""
        return self.num_chunks > 1 or self.overlap_backward


def takes_options(function: Decorated) -> Decorated:
    """Show the fields of ``Options`` in place of ``**keywords``, in signature and docstring."""
    signature = inspect.signature(function)
    keyword, named, lines = inspect.Parameter.KEYWORD_ONLY, [], []
    for one in fields(Options):
        named.append(inspect.Parameter(one.name, keyword, default=one.default, annotation=one.type))
        lines.append(f"        {one.name}: {one.metadata['help']}")

    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = signature.replace(parameters=[*own, *named])
    function.__signature__ = shown  # type: ignore[attr-defined]
    function.__doc__ = f"{function.__doc__}\n    Options:\n" + "\n".join(lines)
    return function
