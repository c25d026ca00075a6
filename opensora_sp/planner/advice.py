"""Advice beside a plan: what would balance ranks better, or take less memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from .batches import BatchSpec
from .run_estimator import Memory, RunEstimator
from .sharing import Sharing, sharing_of

UNEVEN = 0.03  # imbalance above which a better one is searched for
FRAMES_AROUND = 8  # frame counts tried below and above


def better_balance(run: RunEstimator, bucket: BatchSpec, sharing: Sharing, ranks: int) -> list[str]:
    """Other sp_sizes and frame counts with which ranks wait less for each other."""
    if sharing.imbalance <= UNEVEN:
        return []

    shape, enough = run.shape(bucket), max(UNEVEN, sharing.imbalance / 2)
    advice = []
    for other in _other_degrees(run, range(2, run.num_gpus + 1), ranks):
        found = sharing_of(shape, run.options_on(other), other).imbalance
        if found <= enough:
            advice.append(
                f"sp_size={other} has an imbalance of {found:.1%} instead of "
                f"{sharing.imbalance:.1%}"
            )

    also = " (with model.input_size to match)" if hasattr(run.config, "input_size") else ""
    for step in (-1, 1):
        nearest = _nearest_even(run, bucket, ranks, step, enough)
        if nearest is not None:
            num_frames, found = nearest
            advice.append(
                f"num_frames={num_frames} has {found:.1%} instead of {sharing.imbalance:.1%}{also}"
            )

    return advice or [
        f"no other sp_size that divides {run.num_gpus} and no frame count near is more even"
    ]


def _nearest_even(
    run: RunEstimator, bucket: BatchSpec, ranks: int, step: int, enough: float
) -> tuple[int, float] | None:
    """The nearest even frame count below (step -1) or above (1), and its imbalance."""
    latent_frames = run.shape(bucket).frames
    for away in range(1, FRAMES_AROUND + 1):
        num_frames = bucket.num_frames + step * away
        if num_frames < 1:
            break
        shape = run.shape(replace(bucket, num_frames=num_frames))
        if shape.frames in (0, latent_frames):
            continue
        found = sharing_of(shape, run.options_on(ranks), ranks).imbalance
        if found <= enough:
            return num_frames, found
    return None


def less_memory(
    run: RunEstimator, latents: tuple[int, ...], memory: Memory, ranks: int
) -> list[str]:
    """What would make the run fit into ``memory_gb``, where it does not."""
    limit = math.inf if run.memory_gb is None else run.memory_gb * 1e9 - run.reserved
    if memory.configured.needed <= limit:
        return []

    checkpointed = memory.checkpointed
    excess = f"{memory.configured.needed / 1e9:.1f} GB do not fit into {limit / 1e9:.6g} GB"
    if not run.checkpointing and checkpointed and checkpointed.needed <= limit:
        return [f"{excess}: grad_checkpoint=True takes {checkpointed.needed / 1e9:.1f} GB"]

    for other in _other_degrees(run, range(ranks + 1, run.num_gpus + 1), ranks):
        needed = run.memory(latents, other).configured.needed
        if needed <= limit:
            return [f"{excess}: sp_size={other} takes {needed / 1e9:.1f} GB"]

    return [
        f"{excess}, nor do more ranks to a batch help: take fewer frames, a smaller "
        "batch_size, or more GPUs"
    ]


def _other_degrees(run: RunEstimator, degrees: Iterable[int], ranks: int) -> list[int]:
    """Numbers of ranks to advise as ``sp_size``; none where a run chooses for each batch."""
    if isinstance(run.cfg.sp_size, (str, dict)):
        return []
    return [one for one in degrees if run.num_gpus % one == 0 and one != ranks]
