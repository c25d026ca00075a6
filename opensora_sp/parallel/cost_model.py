"""The cost of computation and communication: what strategies, planner and sampler choose by.

Costs are in FLOPs: communication counts as the work that a device does meanwhile.

Legend: B samples, T frames, S patches of a frame, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .batch_shape import BatchShape

ELEMENT_BYTES = 2  # bf16
REFERENCE_WIDTH = 1152  # of STDiT3-XL/2, for which the latency of a preset is stated


@dataclass(frozen=True)
class CostModel:
    """Speed of a device and of its links. All ranks of a group must use the same one.

    Args:
        flops: bf16 matrix products that a model reaches, FLOP/s.
        bandwidth: bytes per second that a rank sends in an all-to-all.
        latency: seconds from the launch of an all-to-all to its first byte.

    Raises:
        ValueError: if a rate is not positive or the latency is negative.
    """

    flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.bandwidth > 0 and self.latency >= 0):
            raise ValueError(
                f"got {self}; expected positive flops and bandwidth and a latency of at least 0; "
                "take a preset of opensora_sp.parallel.cost_model"
            )

    @property
    def flops_per_element(self) -> float:
        """FLOPs computed in the time in which one bf16 number is sent."""
        return self.flops / self.bandwidth * ELEMENT_BYTES

    @property
    def min_chunk_tokens(self) -> int:
        """Tokens of the smallest chunk whose transfer takes as long as its launch.

        Counted at the width of STDiT3-XL/2, whatever the model: one number for all.
        """
        return max(1, round(self.latency * self.bandwidth / (REFERENCE_WIDTH * ELEMENT_BYTES)))

    def few_units(
        self, shape: BatchShape, ranks: int, *, unit: int, num_units: int, row_layout: str
    ) -> FewUnitsCosts:
        """Cost of a block with its exchanges on the busiest rank, where units are fewer than ranks.

        Args:
            unit: tokens of the largest unit, a frame or a window.
            num_units: how many there are, all samples together.
            row_layout: how tokens are distributed where attention is split by heads.
        """
        width, share = shape.width, (ranks - 1) / ranks
        held = max(shape.entries(row_layout, ranks))
        of_heads = -(-num_units * shape.heads // ranks)  # units of one head on the busiest rank

        whole = block_flops(unit, width) + attention_flops(1, unit, width)
        heads = block_flops(held, width) + attention_flops(of_heads, unit, width // shape.heads)
        return FewUnitsCosts(
            whole=whole + 2 * share * unit * width * self.flops_per_element,
            heads=heads + 4 * share * held * width * self.flops_per_element,
        )


# Rates that models reach, not peaks: 400 of 989 TFLOP/s in bf16. The latency makes 256 tokens of
# STDiT3-XL/2 the smallest chunk.
H100 = CostModel(flops=400e12, bandwidth=100e9, latency=5.9e-6)

# 90 % of the 790 TFLOP/s measured for bf16 products on one H200, and an all-to-all among eight of
# them over NVLink at an assumed 350 GB/s. The latency is that of an H100.
H200 = CostModel(flops=711e12, bandwidth=350e9, latency=5.9e-6)


@dataclass(frozen=True)
class FewUnitsCosts:
    """Two ways to attend over few units.

    ``whole`` gives whole units to some ranks and none to the others, and switches twice. ``heads``
    distributes all token-local work, splits the attention alone, and exchanges four activations.
    """

    whole: float
    heads: float

    @property
    def heads_cost_less(self) -> bool:
        return self.heads < self.whole


def block_flops(tokens: int, width: int) -> float:
    """Forward work of a block without attention scores: 28 C^2 a token, with an MLP of 4 C."""
    return 28.0 * width * width * tokens


def attention_flops(rows: int, length: int, width: int) -> float:
    """Forward work of attention over rows of ``length`` tokens."""
    return 4.0 * rows * length * length * width
