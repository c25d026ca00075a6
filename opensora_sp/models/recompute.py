"""Gradient checkpointing: which activations of a block forward keeps, and backward recomputes.

Activation checkpointing (Chen et al., 2016) keeps the input of a block alone. Selective activation
recomputation (Korthikanti et al., 2022) also keeps results that take long to compute for their
size. A *level* is the number of ``STAGES`` that are kept, in the order of the time that each byte
saves. At level 0 all is recomputed, at ``EVERYTHING`` nothing is. Norms, modulation, rotary
positions and GELU are recomputed below ``EVERYTHING``: their results are large and quick. At
``OFFLOADED`` the block's input leaves the device as well (``offload.py``).

With an MLP of four times the width, a block keeps 0, 1, 2, 3, 4, 7, 10 or 14 activations of a token
at the levels -1 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from opensora_sp.common.graphs import Once, Pair, together

from .offload import input_on_host

STAGES = (
    "MLP output",
    "self-attention",
    "cross-attention",
    "q, k and v",
    "projections",
    "MLP hidden layer",
)
EVERYTHING = len(STAGES) + 1
"""The level at which nothing is recomputed."""
OFFLOADED = -1
"""The level at which the input, too, is kept on the host."""

PRODUCTS = ("aten::mm", "aten::addmm")
ATTENTIONS = ("scaled_dot_product", "attention_forward", "flash_attn", "short_rows")


def levels_of(setting: bool | int | str | Sequence[int], num_blocks: int) -> list[int]:
    """The level of each block: True recomputes all blocks, a number the first ones; "offload"
    recomputes all and keeps their inputs on the host.

    Raises:
        ValueError: if the model has fewer blocks, or there is no such level or name.
    """
    if setting == "offload":
        return [OFFLOADED] * num_blocks
    if isinstance(setting, str):
        raise ValueError(
            f"got grad_checkpoint={setting!r}; expected True, False, a number of blocks, 'offload' "
            "or the level of each block; choose one of these (a config may also say 'auto', for "
            "which a run chooses levels)"
        )
    if isinstance(setting, int):
        recomputed = num_blocks * setting if isinstance(setting, bool) else setting
        if not 0 <= recomputed <= num_blocks:
            raise ValueError(
                f"got grad_checkpoint={setting}; expected a number from 0 to {num_blocks}, the "
                "blocks of the model; correct it, or write True for all"
            )
        return [0] * recomputed + [EVERYTHING] * (num_blocks - recomputed)

    levels: list[Any] = list(setting)
    known = range(OFFLOADED, EVERYTHING + 1)
    if len(levels) != num_blocks or not all(level in known for level in levels):
        raise ValueError(
            f"got levels {levels}; expected one from {OFFLOADED} to {EVERYTHING} for each of the "
            f"{num_blocks} blocks; correct them"
        )
    return levels


@dataclass(frozen=True)
class Recompute:
    """How a block runs under gradient checkpointing.

    Args:
        level: below ``EVERYTHING``.
        width, hidden: of the tokens and of the MLP's hidden layer, by which matrix products are
            recognised.
        preserve_rng: draw the same random numbers again, for dropout.
    """

    level: int
    width: int
    hidden: int
    preserve_rng: bool = False

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        context_fn: Callable[[], Pair] | None = None,
    ) -> Any:
        """``function(*args)``, of which backward recomputes what this level does not keep.

        ``context_fn`` is that of ``torch.utils.checkpoint.checkpoint``, in addition.
        """
        makers = [] if context_fn is None else [context_fn]
        if self.level > 0:
            makers.append(self._contexts)
        options: dict[str, Any] = {"context_fn": partial(together, makers)} if makers else {}
        options |= {"use_reentrant": False, "preserve_rng_state": self.preserve_rng}

        tokens: Tensor = args[0]
        with input_on_host(tokens) if self.level == OFFLOADED else nullcontext():
            return checkpoint(function, *args, **options)

    def _contexts(self) -> Pair:
        keeping, using = create_selective_checkpoint_contexts(self._policy)
        return keeping, Once(using)

    def _policy(self, context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keeps = stage_of(operator, args, self.width, self.hidden) in STAGES[: self.level]
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def stage_of(operator: Any, args: Sequence[Any], width: int, hidden: int) -> str | None:
    """The stage that an operator of a block computes, by its name and the shapes it is given."""
    name = operator.name()
    tensors = [one for one in args if isinstance(one, Tensor)]
    if name.partition(".")[0] in PRODUCTS:
        # A Linear of tokens: the last factor is its weight, transposed.
        by_weight: dict[tuple[int, ...], str] = {
            (hidden, width): "MLP output",
            (width, 3 * width): "q, k and v",
            (width, width): "projections",
            (width, hidden): "MLP hidden layer",
        }
        return by_weight.get(tuple(tensors[-1].shape))

    if any(part in name for part in ATTENTIONS):
        return "self-attention" if tensors[0].shape == tensors[1].shape else "cross-attention"
    return None
