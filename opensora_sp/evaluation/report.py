"""What an evaluation found: means with confidence intervals over seeds, as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

# The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% confidence interval; None for one seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, by_seed: list[float]) -> Estimate:
        """Student's t interval of the mean of independent draws."""
        mean = statistics.fmean(by_seed)
        if len(by_seed) < 2:
            return cls(mean, None)
        # Beyond the table the last one is a little too wide.
        quantile = T_QUANTILES[min(len(by_seed) - 1, len(T_QUANTILES)) - 1]
        return cls(mean, quantile * statistics.stdev(by_seed) / math.sqrt(len(by_seed)))

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.4f}"
        return f"{self.mean:.4f}{interval}"


@dataclass(frozen=True)
class BucketLoss:
    """The loss of one bucket: of all timesteps, and of each bin from data to noise."""

    name: str
    clips: int
    loss: Estimate
    bins: list[Estimate]

    @classmethod
    def of(cls, name: str, clips: int, losses: Tensor) -> BucketLoss:
        """From the losses of each seed and bin, ``[S, K]``."""
        by_bin = [Estimate.of(column.tolist()) for column in losses.T]
        return cls(name, clips, Estimate.of(losses.mean(1).tolist()), by_bin)


@dataclass(frozen=True)
class Evaluation:
    """The losses of some weights.

    Attributes:
        weights: their path.
        manifest: of the clips.
        seeds: of noise and timesteps.
        buckets: with a clip that could be read.
        empty: the names of the others.
    """

    weights: str
    manifest: str
    seeds: list[int]
    buckets: list[BucketLoss]
    empty: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)

    def table(self) -> str:
        """A line for each bucket and bin."""
        seeds = f"seed {self.seeds[0]}"
        if len(self.seeds) > 1:
            seeds = (
                f"seeds {self.seeds[0]} to {self.seeds[-1]}; ± is the 95% confidence interval of "
                "the mean over seeds"
            )
        lines = [
            f"held-out loss of {self.weights} on {self.manifest}",
            seeds,
            "bins: equal parts of the timesteps as training draws them, from data (0%) to noise",
        ]

        for bucket in self.buckets:
            lines += ["", f"{bucket.name}: {bucket.clips} clips"]
            lines.append(f"  {'all timesteps':>20}  {bucket.loss}")
            for number, estimate in enumerate(bucket.bins):
                low, high = number / len(bucket.bins), (number + 1) / len(bucket.bins)
                lines.append(f"  {f'{low:.0%} to {high:.0%}':>20}  {estimate}")
        if self.empty:
            lines += ["", f"without clips: {', '.join(self.empty)}"]
        return "\n".join(lines)
