"""The cost of computation and communication: what strategies, planner and sampler choose by.

Costs are in FLOPs: communication counts as the work that a device does meanwhile.

Legend: B samples, T frames, S patches of a frame, P ranks.
"""

from __future__ import annotations

import math
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


LAUNCH = 5e-6  # seconds in which the host queues an operator
CHUNK_LAUNCHES = 40  # of one more chunk at the end of a block: 10 in forward, 30 in backward
FP8_LAUNCHES = 12  # of scaling and rounding in an exchange, on both sides


@dataclass(frozen=True)
class Link:
    """What carries an exchange: its name, and bytes per second that a rank sends over it."""

    name: str
    bandwidth: float


# NVLink 4, of H100 and H200, and a network adapter of 400 Gb/s for each GPU. Both are assumed.
INSIDE_NODE = Link("inside a node", 350e9)
BETWEEN_NODES = Link("between nodes", 40e9)


@dataclass(frozen=True)
class ChunkCosts:
    """Time of a switch of ``num_bytes`` on the busiest rank, and of sending it in chunks.

    Of K chunks all but the last are sent beside the computation in forward, which saves 1 - 1/K of
    the switch. Each further chunk costs launches.
    """

    link: Link
    num_bytes: float

    @property
    def switch(self) -> float:
        """Seconds of the switch as a whole."""
        return self.num_bytes / self.link.bandwidth

    @property
    def further_chunk(self) -> float:
        """Seconds of the launches of one more chunk."""
        return CHUNK_LAUNCHES * LAUNCH

    @property
    def best_number(self) -> int:
        """The fewest chunks K of which one more would not pay: K (K + 1) is at least the ratio."""
        ratio = self.switch / self.further_chunk
        return max(1, math.ceil((math.sqrt(1 + 4 * ratio) - 1) / 2))

    def describe(self) -> str:
        return (
            f"a switch sends {self.num_bytes / 1e6:.3g} MB {self.link.name} in "
            f"{self.switch * 1e3:.2g} ms at {self.link.bandwidth / 1e9:g} GB/s, and one more chunk "
            f"takes {CHUNK_LAUNCHES} launches, {self.further_chunk * 1e3:.2g} ms"
        )


def block_flops(tokens: int, width: int) -> float:
    """Forward work of a block without attention scores: 28 C^2 a token, with an MLP of 4 C."""
    return 28.0 * width * width * tokens


def attention_flops(rows: int, length: int, width: int) -> float:
    """Forward work of attention over rows of ``length`` tokens."""
    return 4.0 * rows * length * length * width
