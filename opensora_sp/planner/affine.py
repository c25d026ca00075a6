"""Activations of many batch sizes from two of them.

For one shape and level of gradient checkpointing, memory is affine in the number of clips. So two
batch sizes are traced and others lie on the line through them.
"""

from __future__ import annotations

from .run_estimator import Memory, RunEstimator
from .trace import Activations

TRACED = 1, 32  # whole clips of a rank, in the two batches that are traced


class AffineEstimator(RunEstimator):
    """Traces two batches of whole clips on each rank; others are on the line through them."""

    def activations(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        num_clips, *shape = latents
        is_known = (latents, ranks, level) in self.traced
        if is_known or num_clips % ranks:
            return super().activations(latents, ranks, level)

        small, large = (number * ranks for number in TRACED)
        low = super().activations((small, *shape), ranks, level)
        high = super().activations((large, *shape), ranks, level)
        return between(low, high, (num_clips - small) / (large - small))

    def verified(self, latents: tuple[int, ...], ranks: int) -> Memory:
        """Memory of a batch whose levels have been traced at this very size."""
        while True:
            memory = self.memory(latents, ranks, brief=True)
            levels = set(memory.levels)
            missing = [level for level in levels if (latents, ranks, level) not in self.traced]
            if not missing:
                return memory
            for level in missing:
                super().activations(latents, ranks, level)


def between(low: Activations, high: Activations, position: float) -> Activations:
    """Activations on the line through two others: ``low`` at position 0, ``high`` at 1."""

    def at(first: float, last: float) -> float:
        return first + position * (last - first)

    return Activations(
        first=at(low.first, high.first),
        pair=at(low.pair, high.pair),
        inputs=round(at(low.inputs, high.inputs)),
        largest=round(at(low.largest, high.largest)),
    )
