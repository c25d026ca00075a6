"""Sampling steps that cost less: cached steps, and steps without guidance.

Cached steps follow TeaCache (Liu et al., 2024). A cached step reuses the residual of the model's
blocks. The change of the timestep embedding from step to step, rescaled by a polynomial that was
fitted to the model's trajectories, estimates the change of the residual. A step is computed where
the sum of these estimates since the last computed step reaches a threshold. TeaCache modulates the
step's input by the embedding and measures its change while it samples. Here the embedding alone
decides, so that the steps are known before, and are the same on any number of ranks.

A guidance interval (Kynkaanniemi et al., 2024) leaves out the unconditional prediction in steps of
other noise levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from typing_extensions import TypedDict

from opensora_sp.common.files import read_json
from opensora_sp.models.block_cache import BlockCache

from .process import DiffusionProcess, Geometry, Prediction, Share

# Of a model's configuration: what differs between models with other curves.
MODEL_SIZES = ("in_channels", "hidden_size", "depth", "num_heads")


@dataclass(frozen=True)
class SamplingStep:
    """A step of sampling.

    Attributes:
        level: noise level, the timestep's share of all timesteps: 0 (data) to 1 (noise).
        guided: it makes all predictions that guidance takes (one with ``cfg_scale=1``), not the
            conditional one alone.
        computed: it runs the model's blocks.
    """

    level: float
    guided: bool = True
    computed: bool = True


class CacheCurve(TypedDict):
    """A model's curve for cached steps, as scripts/fit_cache_curve.py writes it.

    ``path`` are lengths of the path of the timestep embedding, up to evenly spaced noise levels
    from 0 to 1. ``polynomial`` maps differences of them to changes of the residual; its
    coefficients fall in power.
    """

    model: dict[str, Any]
    path: Annotated[list[float], Field(min_length=2)]
    polynomial: Annotated[list[float], Field(min_length=1)]


def read_curve(path: str) -> Any:
    """The content of the JSON file of a curve.

    Raises:
        ValueError: if there is no such file, or it is not JSON.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"got cache_curve {path!r}, which is no file; expected a model's curve; fit one with "
            "scripts/fit_cache_curve.py"
        )
    return read_json(path)


def described_model(model: type, config: Any) -> dict[str, Any]:
    """The model that a curve is of, as JSON values."""
    sizes = {name: getattr(config, name) for name in MODEL_SIZES}
    return {"type": model.__name__, **sizes}


def check_curve(curve: CacheCurve, model: type, config: Any) -> None:
    """Raise ValueError unless a curve is a rising one of a model of this class and sizes."""
    expected = described_model(model, config)
    if curve["model"] != expected:
        raise ValueError(
            f"got a cache_curve of the model {curve['model']}; expected {expected}; fit one with "
            "scripts/fit_cache_curve.py, or remove cache_curve and cache_threshold"
        )
    if any(length > following for length, following in pairwise(curve["path"])):
        raise ValueError(
            f"got a cache_curve whose path falls: {curve['path']}; expected lengths up to rising "
            "noise levels; fit the curve again with scripts/fit_cache_curve.py"
        )


def _interval_of(interval: Any) -> Any:
    """The numbers in "LOW,HIGH", or the interval itself."""
    return interval.split(",") if isinstance(interval, str) else interval


Interval = Annotated[tuple[Share, Share], BeforeValidator(_interval_of)]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of a process's sampler that lower its cost.

    ``guidance_interval`` are the lowest and the highest noise level, from 0 (data) to 1 (noise), at
    which guidance applies. ``cache_threshold`` is the estimated change of the blocks' residual,
    relative to the residual, up to which it is reused; 0 computes all steps. ``cache_curve`` is the
    model's curve; a config may have the path of its JSON file.

    Raises:
        ValueError: for an empty interval, or a threshold without a curve.
    """

    guidance_interval: Interval = (0.0, 1.0)
    cache_threshold: Annotated[float, Field(ge=0)] = 0.0
    cache_curve: CacheCurve | None = None

    def __post_init__(self) -> None:
        low, high = self.guidance_interval
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"got guidance_interval {(low, high)}; expected two noise levels from 0 (data) to "
                "1 (noise), the lower one first; correct them"
            )
        if self.cache_threshold and self.cache_curve is None:
            raise ValueError(
                f"got cache_threshold {self.cache_threshold} without a cache_curve; expected the "
                "curve of this model; fit one with scripts/fit_cache_curve.py and set its path"
            )

    def noise_levels(self, geometry: Geometry) -> list[float]:
        """The noise level of each sampling step of the first sample, falling."""
        raise NotImplementedError


def sampling_steps(
    process: DiffusionProcess, shape: tuple[int, int, int], latent_frames: int
) -> list[SamplingStep]:
    """The steps of a sampling, which its batch does not change.

    Args:
        shape: frames, height and width of the video.
        latent_frames: frames of the latents.

    Raises:
        ValueError: if the guidance interval holds no step.
    """
    if not isinstance(process, SamplingOptions):
        # A process from outside of the package.
        return [SamplingStep(math.nan)] * process.num_sampling_steps

    # In float64 on the CPU: every rank and the planner get the same numbers.
    num_frames, *sides = shape
    height, width = (torch.tensor([side], dtype=torch.float64) for side in sides)
    levels = process.noise_levels(
        process.geometry(height, width, latent_frames=latent_frames, video_frames=num_frames)
    )
    # A timestep transform may round the first one up.
    levels = [min(level, 1.0) for level in levels]
    low, high = process.guidance_interval
    # Without guidance by text or frames there is none to leave out.
    is_off = process.cfg_scale == 1 and getattr(process, "image_cfg_scale", None) in (None, 1)
    guided = [is_off or low <= level <= high for level in levels]
    if not any(guided):
        raise ValueError(
            f"got guidance_interval {(low, high)}, in which no step lies; expected some of the "
            f"noise levels {[round(level, 3) for level in levels]}; widen it, or set cfg_scale=1"
        )
    computed = computed_steps(levels, guided, process.cache_curve, process.cache_threshold)
    return [SamplingStep(*step) for step in zip(levels, guided, computed, strict=True)]


def describe_steps(steps: Sequence[SamplingStep]) -> str:
    """Which steps are computed and guided, for the log and the planner; empty if all are."""
    parts = []
    for name in ("computed", "guided"):
        numbers = [i for i, step in enumerate(steps) if getattr(step, name)]
        if len(numbers) < len(steps):
            listed = ", ".join(map(str, numbers))
            parts.append(f"{len(numbers)} of {len(steps)} steps are {name} ({listed})")
    return "; ".join(parts)


def computed_steps(
    levels: Sequence[float],
    guided: Sequence[bool],
    curve: CacheCurve | None,
    threshold: float,
) -> list[bool]:
    """True for each step that runs the model's blocks.

    The first and the last step do, and steps with another number of predictions than the one
    before, whose residual does not fit.
    """
    if curve is None or threshold == 0:
        return [True] * len(levels)

    computed, change = [True], 0.0
    for i, (last, level) in enumerate(pairwise(levels), 1):
        distance = path_length(curve["path"], last) - path_length(curve["path"], level)
        # The largest up to there: beyond the distances of its fit the polynomial may fall.
        changes = np.polyval(curve["polynomial"], np.linspace(0, distance, 20))
        change += max(0.0, float(changes.max()))
        must = i + 1 == len(levels) or guided[i] != guided[i - 1]
        computed.append(must or change >= threshold)
        if computed[-1]:
            change = 0.0
    return computed


def path_length(path: Sequence[float], level: float) -> float:
    """Length of the path of the timestep embedding up to a noise level, interpolated."""
    return float(np.interp(level, np.linspace(0, 1, len(path)), path))


class CachedPrediction:
    """A prediction that keeps and reuses the residual of blocks: one object for one sampling.

    A step whose conditioning frames differ from the frames of the kept residual is computed.

    Args:
        predict: passes ``cache`` to the model.
        computed: True for each step that runs the blocks.
    """

    def __init__(self, predict: Prediction, cache: BlockCache, computed: Sequence[bool]) -> None:
        self.predict, self.cache, self.computed = predict, cache, computed
        self.step = 0
        self.kept_mask: Tensor | None = None

    def __call__(self, x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        """The prediction ``[B, C_out, F, h, w]`` of the next step."""
        has_next = self.step + 1 < len(self.computed)
        next_reuses = has_next and not self.computed[self.step + 1]

        kept = self.kept_mask
        fits = x_mask is None or (kept is not None and torch.equal(x_mask, kept))
        self.cache.reuses = not self.computed[self.step] and fits
        self.cache.keeps = next_reuses and not self.cache.reuses
        if self.cache.keeps:
            self.kept_mask = x_mask

        prediction = self.predict(x, t, x_mask)
        if not next_reuses:
            self.cache.residual = None
        self.step += 1
        return prediction
