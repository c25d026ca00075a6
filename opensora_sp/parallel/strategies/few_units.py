"""Batches with fewer frames or windows than ranks: whole units on some ranks, or heads on all.

Whole units leave the other ranks without work. Heads of an attention can be distributed instead,
which sends queries, keys, values and outputs. The cost model decides.

Legend: B samples, T frames, W windows of a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..batch_shape import BatchShape
from ..cost_model import ELEMENT_BYTES, block_flops
from ..layout import TEMPORAL_ROWS
from ..options import Options


@dataclass(frozen=True)
class FewUnitsCosts:
    """Seconds of a block with its exchanges on the busiest rank, in two ways to attend.

    ``whole`` gives whole units to some ranks and none to the others, and switches. ``heads``
    distributes all token-local work, splits the attention alone, and exchanges four activations.
    """

    whole: float
    heads: float

    @property
    def heads_cost_less(self) -> bool:
        return self.heads < self.whole


def few_units_costs(
    shape: BatchShape,
    options: Options,
    ranks: int,
    *,
    unit: int,
    num_units: int,
    row_layout: str,
    switches: int = 2,
) -> FewUnitsCosts:
    """Cost of a block where units are fewer than ranks.

    Args:
        unit: tokens of the largest unit, a frame or a window.
        num_units: how many there are, all samples together.
        row_layout: how tokens are distributed where attention is split by heads.
        switches: exchanges of a block whose units are whole.
    """
    model, link = options.cost_model, options.link
    width, heads = shape.width, shape.heads
    sent = (ranks - 1) / ranks * width * ELEMENT_BYTES
    local_tokens = max(shape.entries(row_layout, ranks))
    # Units of one head on the busiest rank.
    head_units = -(-num_units * heads // ranks)

    def compute(tokens: int, head_units: int) -> float:
        attention = model.attention(head_units, unit, unit, width // heads)
        return block_flops(tokens, width) / model.flops + attention

    return FewUnitsCosts(
        whole=compute(unit, heads) + link.seconds(switches * sent * unit, exchanges=switches),
        heads=compute(local_tokens, head_units)
        + link.seconds(4 * sent * local_tokens, exchanges=2),
    )


def few_frames_costs(shape: BatchShape, options: Options, ranks: int) -> FewUnitsCosts:
    """Cost of a spatial block by whole frames, and by frames x heads."""
    return few_units_costs(
        shape,
        options,
        ranks,
        unit=shape.patches,
        num_units=shape.num_frames,
        row_layout=TEMPORAL_ROWS,
        # Without temporal blocks, tokens stay in spatial rows.
        switches=2 if shape.alternates else 0,
    )


def few_frames_reason(shape: BatchShape, options: Options, ranks: int, choice: str) -> str:
    """The reason of a choice for fewer frames than ranks."""
    costs = few_frames_costs(shape, options, ranks)
    return (
        f"B*T={shape.num_frames} frames are fewer than {ranks} ranks: {choice}, "
        f"which costs less ({costs.whole * 1e6:.3g} us a spatial block by whole frames, "
        f"{costs.heads * 1e6:.3g} us by frames x heads)"
    )
