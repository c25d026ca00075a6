"""Noise schedules of Gaussian diffusion, their tables, and the elementwise terms of its variational
bound.

Follows Ho et al., 2020 (linear schedule, posterior), Nichol & Dhariwal, 2021 (cosine schedule,
respacing, learned variance); names of schedules and the way respacing is written are those of the
public implementations.

Legend: N steps after respacing, B samples; the notation of the papers is alpha_bar for what is left
of the signal's variance, beta for the noise added in one step.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from dataclasses import fields as fields_of

import torch
from torch import Tensor

MAX_BETA = 0.999
HALF_BIN = 1 / 255  # of the 256 grey levels in [-1, 1]
MIN_PROBABILITY = 1e-12


def named_betas(name: str, num_steps: int) -> Tensor:
    """The noise added in each of N steps, float64 ``[N]``.

    Raises:
        ValueError: for an unknown schedule, or fewer steps than it can be spread over.
    """
    if name == "linear":
        # Scaled so that any number of steps ends at the same noise.
        stretch = 1000 / num_steps
        if 0.02 * stretch >= 1:
            raise ValueError(
                f"got {num_steps} diffusion steps with the linear schedule; expected more than 20; "
                "take few of many steps with timestep_respacing"
            )
        return torch.linspace(stretch * 0.0001, stretch * 0.02, num_steps, dtype=torch.float64)

    if name == "squaredcos_cap_v2":
        at = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
        alpha_bar = torch.cos((at + 0.008) / 1.008 * math.pi / 2).square()
        return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=MAX_BETA)

    raise ValueError(
        f"got noise_schedule {name!r}; expected 'linear' or 'squaredcos_cap_v2' (cosine); choose "
        "one of them"
    )


def respaced_steps(num_steps: int, spacing: str) -> list[int]:
    """Which of ``num_steps`` steps are kept, ascending.

    Args:
        spacing: "" keeps all; "ddimN" takes N at an even integer stride from 0 (Song et al., 2020);
            "n" or "n1,n2,.." divides the steps into as many sections and takes so many of each,
            first and last included.

    Raises:
        ValueError: if the steps cannot be divided so.
    """
    if not spacing:
        return list(range(num_steps))

    wanted = spacing.removeprefix("ddim")
    counts = [int(part) if part.strip().isdecimal() else 0 for part in wanted.split(",")]
    if min(counts) < 1 or (wanted != spacing and len(counts) > 1):
        raise ValueError(
            f"got timestep_respacing {spacing!r}; expected numbers of steps as '100' or "
            "'10,15,20', or 'ddim20'; write it so"
        )
    if wanted != spacing:
        return _strided(num_steps, counts[0])

    size_of_all, larger = divmod(num_steps, len(counts))
    sizes = [size_of_all + (i < larger) for i in range(len(counts))]
    kept, start = [], 0
    for size, count in zip(sizes, counts, strict=True):
        if count > size:
            raise ValueError(
                f"got timestep_respacing {spacing!r}, {count} steps out of a section of {size}; "
                f"expected at most {size}; take fewer"
            )

        # Summed and not multiplied, as in the public implementations, for the same rounding.
        stride = (size - 1) / (count - 1) if count > 1 else 1.0
        places = itertools.accumulate(itertools.repeat(stride, count - 1), initial=0.0)
        kept += [start + round(place) for place in places]
        start += size
    return kept


def _strided(num_steps: int, count: int) -> list[int]:
    for stride in range(1, num_steps + 1):
        steps = range(0, num_steps, stride)
        if len(steps) == count:
            return list(steps)

    possible = {len(range(0, num_steps, stride)) for stride in range(1, num_steps + 1)}
    nearest = min(possible, key=lambda other: abs(other - count))
    raise ValueError(
        f"got timestep_respacing 'ddim{count}' of {num_steps} steps; expected a number of steps "
        f"that an integer stride gives; take 'ddim{nearest}', or '{count}' for strides that differ"
    )


@dataclass(frozen=True)
class Steps:
    """Tables of all N steps ``[N]``, or of the steps of some samples ``[B, 1, ..]``.

    Attributes:
        alpha_bar_before: alpha_bar of step t - 1; 1 at step 0.
        signal, noise: ``x_t = signal * x_0 + noise * noise``.
        per_x, per_noise: ``x_0 = per_x * x_t - per_noise * noise``.
        mean_of_start, mean_of_x: posterior mean of ``x_{t-1}``,
            ``mean_of_start * x_0 + mean_of_x * x_t``.
        log_smallest: log of the posterior variance; at step 0, where that is 0, that of step 1.
        log_largest: log of beta.
        log_fixed: log of beta, but at step 0 as in ``log_smallest``.
        is_first: 1 at step 0, else 0.
    """

    beta: Tensor
    alpha_bar: Tensor
    alpha_bar_before: Tensor
    signal: Tensor
    noise: Tensor
    per_x: Tensor
    per_noise: Tensor
    mean_of_start: Tensor
    mean_of_x: Tensor
    log_smallest: Tensor
    log_largest: Tensor
    log_fixed: Tensor
    is_first: Tensor

    @classmethod
    def of(cls, alpha_bar: Tensor, dtype: torch.dtype) -> Steps:
        """The tables for ``alpha_bar``, float64 ``[N]``, computed in ``dtype``."""
        one = alpha_bar.new_ones(1)
        beta = (1 - alpha_bar / torch.cat([one, alpha_bar[:-1]])).to(dtype)
        alpha_bar = (1 - beta).cumprod(0)
        before = torch.cat([one.to(dtype), alpha_bar[:-1]])

        # The posterior variance is 0 at step 0; a single step has beta instead.
        variance = beta * (1 - before) / (1 - alpha_bar) if len(beta) > 1 else beta
        at_first = variance[1:2] if len(beta) > 1 else variance

        return cls(
            beta=beta,
            alpha_bar=alpha_bar,
            alpha_bar_before=before,
            signal=alpha_bar.sqrt(),
            noise=(1 - alpha_bar).sqrt(),
            per_x=(1 / alpha_bar).sqrt(),
            per_noise=(1 / alpha_bar - 1).sqrt(),
            mean_of_start=beta * before.sqrt() / (1 - alpha_bar),
            mean_of_x=(1 - before) * (1 - beta).sqrt() / (1 - alpha_bar),
            log_smallest=torch.cat([at_first, variance[1:]]).log(),
            log_largest=beta.log(),
            log_fixed=torch.cat([at_first, beta[1:]]).log(),
            is_first=(torch.arange(len(beta)) == 0).to(dtype),
        )

    def at(self, t: Tensor, like: Tensor) -> Steps:
        """The tables of steps t ``[B]``, as ``[B, 1, ..]`` in the dtype of ``like [B, ..]``."""
        tables = torch.stack([getattr(self, field.name) for field in fields_of(self)]).to(t.device)
        chosen = tables[:, t].to(like.dtype)
        return Steps(*chosen.view(len(tables), -1, *[1] * (like.ndim - 1)))


def gaussian_kl(
    mean: Tensor, log_variance: Tensor, other_mean: Tensor, other_log_variance: Tensor
) -> Tensor:
    """KL divergence of one diagonal Gaussian from another, elementwise, in nats."""
    ratio = log_variance - other_log_variance
    distance = (mean - other_mean).square() * torch.exp(-other_log_variance)
    return 0.5 * (ratio.exp() + distance - ratio - 1)


def discretised_nll(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Negative log probability of the grey level of x in [-1, 1] under a Gaussian, elementwise, in
    nats.

    256 levels are spread over [-1, 1], the outermost reach to infinity; the cumulative normal is
    the tanh approximation that the public implementations take.
    """
    distance, precision = x - mean, torch.exp(-0.5 * log_variance)
    below_upper = _cumulative_normal(precision * (distance + HALF_BIN))
    below_lower = _cumulative_normal(precision * (distance - HALF_BIN))
    probability = torch.where(x < -0.999, below_upper, below_upper - below_lower)
    probability = torch.where(x > 0.999, 1 - below_lower, probability)
    return -probability.clamp(min=MIN_PROBABILITY).log()


def _cumulative_normal(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
