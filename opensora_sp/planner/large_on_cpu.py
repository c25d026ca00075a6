"""A warning, before weights are loaded, where a large model is about to run on CPUs."""

from __future__ import annotations

import logging

import torch

from opensora_sp.config import InferenceConfig, TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.cost_model import CPU
from opensora_sp.runtime.cost_model_file import cost_model_of

from .batches import batches_by_name
from .memory import ModelSizes, Persistent
from .run_estimator import RunEstimator

logger = logging.getLogger(__name__)
LARGE = 100e6
"""Parameters: fewer than any released model has (STDiT-XL/2: 600 M), more than demos on CPUs."""
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))


def warn_if_large_on_cpu(
    cfg: TrainConfig | InferenceConfig, device: torch.device, mesh: SequenceMesh
) -> None:
    """Log what to expect of a model of at least ``LARGE`` parameters on a CPU, and what to use.

    The time is that of the model in fp32 (``CostModel``), without encoders.
    """
    spec = cfg.model_spec
    if device.type != "cpu" or ModelSizes.of(spec.name, spec.config).total < LARGE:
        return

    if isinstance(cfg, InferenceConfig):
        cfg = cfg.model_copy(update={"sp_size": mesh.sp_size})
    rates, per_node = cost_model_of(cfg.cost_model, default=CPU), mesh.ranks_per_node
    run = RunEstimator(cfg, mesh.world_size, device="cpu", rates=rates, gpus_per_node=per_node)
    state = run.persistent if run.training else Persistent.sampling(run.sizes, run.dtype.itemsize)
    logger.warning(
        "%s has %.0f M parameters, and torch sees no GPU: expect at least %s, and in each process "
        "%.1f GB of memory for %s; run it on GPUs (opensora-sp doctor reports what is wrong if "
        "there are some), or begin with the small model of opensora-sp init",
        run.name,
        run.sizes.total / 1e6,
        _expected_time(run),
        state.total / 1e9,
        "weights and optimizer" if run.training else "the weights",
    )


def _expected_time(run: RunEstimator) -> str:
    """Time of a training step of the largest bucket, or of the steps of a batch of videos."""
    seconds = 0.0
    for spec in batches_by_name(run.cfg).values():
        # Where a batch size is chosen later, one clip is counted.
        num_samples, *shape = run.latents(spec)
        latents = (max(1, num_samples), *shape)
        seconds = max(seconds, run.seconds(latents, run.ranks, run.lowest_levels[0]))

    # The preset is of one thread.
    seconds *= run.micro_batches_on(run.ranks) / torch.get_num_threads()
    if not isinstance(run.cfg, InferenceConfig):
        return f"{_in_words(seconds)} a step"
    steps = build_component(run.cfg.scheduler, SCHEDULERS).num_sampling_steps
    return f"{_in_words(seconds * steps * run.cfg.loop)} for each batch of videos"


def _in_words(seconds: float) -> str:
    """For example ``3.2 hours``."""
    for unit, length in UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.0f} seconds"
