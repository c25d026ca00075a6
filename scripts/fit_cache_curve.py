"""Fit the curve of cached sampling steps (docs/sampling.md) to a model's own trajectories.

python scripts/fit_cache_curve.py CONFIG --ckpt PATH --prompt TEXT --curve curve.json

Samples the prompts of a sampling config with all steps computed, and writes the curve as JSON for
``scheduler.cache_curve``. A few prompts of the sizes and the number of steps in use suffice. The
polynomial maps the length of the path of the timestep embedding between two steps to the relative
change of the blocks' residual (L1).

Legend: G noise levels, C hidden width.
"""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora_sp.cli.sample import config_of, parser
from opensora_sp.common.console import report_errors
from opensora_sp.common.files import check_writable
from opensora_sp.diffusion.cached_steps import (
    computed_steps,
    described_model,
    path_length,
    sampling_steps,
)
from opensora_sp.models.block_cache import BlockCache
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import Request, batches_of
from opensora_sp.sampling.run import build_pipeline, preflight

# Intervals of the path, powers of the polynomial, and steps between residuals that it is fitted to:
# larger ones make the curve serve fewer steps.
INTERVALS, DEGREE, FURTHEST = 50, 4, 4
SHOWN = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3)


def main() -> None:
    arguments = parser()
    arguments.add_argument("--curve", required=True, metavar="FILE", help="the JSON file to write")
    args = arguments.parse_args()
    with report_errors():
        cfg, file = config_of(args), Path(args.curve)
        check_writable(file.parent, "--curve")
        computed = {**cfg.scheduler, "cache_threshold": 0.0, "guidance_interval": (0.0, 1.0)}
        cfg = cfg.model_copy(update={"scheduler": computed})
        requests, weights = preflight(cfg)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pipeline = build_pipeline(cfg, weights, SequenceMesh(1), device)
        curve = fitted_curve(pipeline, requests)

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(curve) + "\n")
    levels = levels_of(pipeline, requests[0])
    for threshold in SHOWN:
        computed = computed_steps(levels, [True] * len(levels), curve, threshold)
        numbers = [i for i, is_computed in enumerate(computed) if is_computed]
        print(f"cache_threshold {threshold}: {len(numbers)} computed steps, {numbers}")


def fitted_curve(pipeline: Pipeline, requests: list[Request]) -> dict[str, Any]:
    """The curve of a pipeline's model, as JSON values.

    Raises:
        ValueError: for fewer steps than a polynomial can be fitted to.
    """
    steps = pipeline.process.num_sampling_steps
    if steps < FURTHEST:
        raise ValueError(
            f"got num_sampling_steps {steps} to fit a curve to; expected at least {FURTHEST}; pass "
            "for example --num-sampling-steps 30"
        )
    path = embedding_path(pipeline)
    distances, changes = list[float](), list[float]()
    for batch in batches_of(requests, pipeline.cfg.batch_size):
        levels = levels_of(pipeline, batch[0])
        for first, second, change in residual_changes(pipeline, batch):
            distances.append(path_length(path, levels[first]) - path_length(path, levels[second]))
            changes.append(change)

    # Relative errors count, since many small changes add up.
    polynomial = np.polyfit(distances, changes, DEGREE, w=1 / np.array(changes))
    fitted = np.polyval(polynomial, distances)
    error = np.median(abs(fitted / np.array(changes) - 1))
    print(f"{len(changes)} changes; median error of the fit {error:.0%}")
    spec = pipeline.cfg.model_spec
    return {
        "model": described_model(spec.model_class, spec.config),
        "path": [round(length, 5) for length in path],
        "polynomial": [float(f"{number:.5g}") for number in polynomial],
    }


def levels_of(pipeline: Pipeline, request: Request) -> list[float]:
    """The noise levels of a request's steps."""
    latent_frames = pipeline.vae.latent_size(*request.shape)[0]
    return [step.level for step in sampling_steps(pipeline.process, request.shape, latent_frames)]


@torch.no_grad()
def embedding_path(pipeline: Pipeline) -> list[float]:
    """Lengths ``[G]`` of the path of the timestep embedding from noise level 0 up to each level.

    The length of an interval is the relative change of the embedding in it (L1).
    """
    model: Any = pipeline.model
    process = pipeline.process
    largest = getattr(process, "num_timesteps", None) or getattr(process, "diffusion_steps", 1000)
    timesteps = torch.linspace(0, largest, INTERVALS + 1, device=pipeline.device)
    embedded = model.t_embedder(timesteps[:, None])[:, 0]  # [G, C]
    path = [0.0]
    for last, following in pairwise(embedded):
        path.append(path[-1] + relative_change(last, following))
    return path


def residual_changes(pipeline: Pipeline, batch: list[Request]) -> list[tuple[int, int, float]]:
    """Pairs of steps at most ``FURTHEST`` apart, and the change of the blocks' residual."""
    cache, residuals = BlockCache(), deque[Tensor](maxlen=FURTHEST)
    cache.keeps = True
    changes = list[tuple[int, int, float]]()

    def compare(step: int, t: Tensor, latents: Tensor) -> None:
        assert cache.residual is not None
        for distance, residual in enumerate(reversed(residuals), 1):
            change = relative_change(residual, cache.residual)
            changes.append((step - distance, step, change))
        residuals.append(cache.residual)

    def keep(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "block_cache": cache}

    hook = pipeline.model.register_forward_pre_hook(keep, with_kwargs=True)
    pipeline.latents(batch, on_step=compare)
    hook.remove()
    return changes


def relative_change(earlier: Tensor, later: Tensor) -> float:
    """Sum of the absolute change, relative to the absolute numbers of the earlier one."""
    return float((later - earlier).abs().sum() / earlier.abs().sum())


if __name__ == "__main__":
    main()
