"""The options of sequence parallelism, each declared once.

``Options`` holds name, default and help text. The keywords of ``parallelize``, the section
``sequence_parallel`` of a config and its reference page derive from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .cost_model import H100, CostModel, Link

# The values of ``strategy``; ``register_strategy`` adds more.
STRATEGY_OPTIONS = ["switch", "ulysses", "split_gather"]


def _option(default: Any, text: str, *, in_config: bool = True) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text, "in_config": in_config})


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
            "in_config": False,
        },
    )
    spans_nodes: bool = _option(
        False,
        "True if the group of ranks lies on several nodes, so that its exchanges use the network. "
        "Taken from the current group of the mesh, whatever is passed here.",
        in_config=False,
    )
    verify: bool = _option(
        False,
        "Run the first batch with and without sequence parallelism, log the largest relative "
        "differences of output and gradients, and raise an error if they exceed rounding.",
    )

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGY_OPTIONS:
            raise ValueError(
                f"got strategy {self.strategy!r}; expected one of {STRATEGY_OPTIONS}; choose one "
                "of these, or register it first (register_strategy)"
            )

        chunks = self.overlap_chunks
        if chunks != "auto" and (isinstance(chunks, str) or chunks < 1):
            raise ValueError(
                f"got overlap_chunks {chunks}; expected at least 1, or 'auto'; 1 turns chunks off"
            )
        if self.overlaps and self.strategy != "switch":
            raise ValueError(
                f"got overlap_chunks {self.overlap_chunks} and overlap_backward "
                f"{self.overlap_backward} with strategy {self.strategy!r}; expected 'switch', "
                "whose exchanges lie between blocks; change it or leave the overlap out"
            )

    @property
    def link(self) -> Link:
        """The link that carries the exchanges of the group of ranks."""
        return self.cost_model.link(spans_nodes=self.spans_nodes)

    @property
    def num_chunks(self) -> int:
        """``overlap_chunks``, where "auto" has not been replaced by a number: 1."""
        return 1 if isinstance(self.overlap_chunks, str) else self.overlap_chunks

    @property
    def overlaps(self) -> bool:
        """True if any exchange overlaps with computation."""
        return self.num_chunks > 1 or self.overlap_backward
