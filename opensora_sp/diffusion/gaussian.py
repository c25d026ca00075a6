"""Noise schedules of Gaussian diffusion, their tables, and the elementwise terms of its variational
bound.

Follows Ho et al., 2020 (linear schedule, posterior), Nichol & Dhariwal, 2021 (cosine schedule,
respacing, learned variance); schedules are named and respacing is written as in the
public implementations.

Legend: N steps after respacing, B samples. As in the papers, beta is the variance of the noise
added in one step, alpha_bar the share of the data's variance that remains.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_sp.common.tensors import to_device

MAX_BETA = 0.999
HALF_BIN = 1 / 255  # of the 256 grey levels in [-1, 1]
MIN_PROBABILITY = 1e-12


def named_betas(name: str, num_steps: int) -> Tensor:
    """The noise added in each of N steps, float64 ``[N]``.

    Raises:
        ValueError: for an unknown schedule, or too few steps for the linear one.
    """
    if name == "linear":
        # Any number of steps ends at the same noise.
        scale = 1000 / num_steps
        if 0.02 * scale >= 1:
            raise ValueError(
                f"got {num_steps} diffusion steps with the linear schedule; expected more than 20; "
                "take few of many steps with timestep_respacing"
            )
        return torch.linspace(scale * 0.0001, scale * 0.02, num_steps, dtype=torch.float64)

    if name == "squaredcos_cap_v2":
        t = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
        alpha_bar = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
        return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=MAX_BETA)

    raise ValueError(
        f"got noise_schedule {name!r}; expected 'linear' or 'squaredcos_cap_v2' (cosine); choose "
        "one of them"
    )


def respaced_steps(num_steps: int, spacing: str) -> list[int]:
    """The steps among ``num_steps`` that are kept, ascending.

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

    kept: list[int] = []
    start, sections = 0, len(counts)
    for i, count in enumerate(counts):
        # The first sections are larger by one step if they cannot be equal.
        size = num_steps // sections + (i < num_steps % sections)
        if count > size:
            raise ValueError(
                f"got timestep_respacing {spacing!r}, {count} steps out of a section of {size}; "
                f"expected at most {size}; take fewer"
            )

        # Summed and not multiplied, as in the public implementations, for the same rounding.
        stride = (size - 1) / (count - 1) if count > 1 else 1.0
        offsets = itertools.accumulate(itertools.repeat(stride, count - 1), initial=0.0)
        kept += [start + round(offset) for offset in offsets]
        start += size
    return kept


def _strided(num_steps: int, count: int) -> list[int]:
    strided = (range(0, num_steps, stride) for stride in range(1, num_steps + 1))
    nearest = min(strided, key=lambda steps: abs(len(steps) - count))
    if len(nearest) != count:
        raise ValueError(
            f"got timestep_respacing 'ddim{count}' of {num_steps} steps; expected a number of "
            f"steps that an integer stride gives; take 'ddim{len(nearest)}', or '{count}' for "
            "strides that differ"
        )
    return list(nearest)


@dataclass(frozen=True)
class Steps:
    """Tables of all N steps ``[N]``, or of the steps of some samples ``[B, 1, ..]``.

    Attributes:
        alpha_bar_prev: alpha_bar of step t - 1; 1 at step 0.
        sqrt_alpha_bar, sqrt_one_minus_alpha_bar: factors of x_0 and of the noise in ``x_t``.
        sqrt_recip_alpha_bar, sqrt_recipm1_alpha_bar: factors of x_t and of the noise, which is
            subtracted, in ``x_0``.
        posterior_mean_coef1, posterior_mean_coef2: factors of x_0 and of x_t in the posterior mean
            of ``x_{t-1}``.
        posterior_log_variance: at step 0, where the variance is 0, the value of step 1.
        log_beta: log of beta.
        log_beta_clipped: log of beta, but at step 0 as in ``posterior_log_variance``.
        is_first: 1 at step 0, else 0.
    """

    beta: Tensor
    alpha_bar: Tensor
    alpha_bar_prev: Tensor
    sqrt_alpha_bar: Tensor
    sqrt_one_minus_alpha_bar: Tensor
    sqrt_recip_alpha_bar: Tensor
    sqrt_recipm1_alpha_bar: Tensor
    posterior_mean_coef1: Tensor
    posterior_mean_coef2: Tensor
    posterior_log_variance: Tensor
    log_beta: Tensor
    log_beta_clipped: Tensor
    is_first: Tensor

    @classmethod
    def of(cls, alpha_bar: Tensor, dtype: torch.dtype) -> Steps:
        """The tables for ``alpha_bar``, float64 ``[N]``, computed in ``dtype``."""
        beta = (1 - alpha_bar / F.pad(alpha_bar[:-1], (1, 0), value=1)).to(dtype)
        # Again from beta, as in the public implementations, for the same rounding.
        alpha_bar = (1 - beta).cumprod(0)
        previous = F.pad(alpha_bar[:-1], (1, 0), value=1)

        # The posterior variance is 0 at step 0. A single step has beta instead.
        variance = beta * (1 - previous) / (1 - alpha_bar) if len(beta) > 1 else beta
        first_variance = variance[:2][-1:]

        return cls(
            beta=beta,
            alpha_bar=alpha_bar,
            alpha_bar_prev=previous,
            sqrt_alpha_bar=alpha_bar.sqrt(),
            sqrt_one_minus_alpha_bar=(1 - alpha_bar).sqrt(),
            sqrt_recip_alpha_bar=(1 / alpha_bar).sqrt(),
            sqrt_recipm1_alpha_bar=(1 / alpha_bar - 1).sqrt(),
            posterior_mean_coef1=beta * previous.sqrt() / (1 - alpha_bar),
            posterior_mean_coef2=(1 - previous) * (1 - beta).sqrt() / (1 - alpha_bar),
            posterior_log_variance=torch.cat([first_variance, variance[1:]]).log(),
            log_beta=beta.log(),
            log_beta_clipped=torch.cat([first_variance, beta[1:]]).log(),
            is_first=(torch.arange(len(beta)) == 0).to(dtype),
        )

    def posterior_mean(self, x_start: Tensor, x_t: Tensor) -> Tensor:
        """The mean of ``x_{t-1}`` given x_0 and x_t."""
        return self.posterior_mean_coef1 * x_start + self.posterior_mean_coef2 * x_t

    def at(self, t: Tensor, like: Tensor) -> Steps:
        """The tables of steps t ``[B]``, as ``[B, 1, ..]`` in the dtype of ``like [B, ..]``."""
        tables = torch.stack([*vars(self).values()])
        chosen = to_device(tables, t.device)[:, t].to(like.dtype)
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

    256 levels divide [-1, 1], the outermost reach to infinity. The cumulative normal is the tanh
    approximation of the public implementations.
    """
    distance, precision = x - mean, torch.exp(-0.5 * log_variance)
    below_upper = _cumulative_normal(precision * (distance + HALF_BIN))
    below_lower = _cumulative_normal(precision * (distance - HALF_BIN))
    probability = torch.where(x < -0.999, below_upper, below_upper - below_lower)
    probability = torch.where(x > 0.999, 1 - below_lower, probability)
    return -probability.clamp(min=MIN_PROBABILITY).log()


def _cumulative_normal(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
