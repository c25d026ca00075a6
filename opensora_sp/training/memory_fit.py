"""What fits into the memory of the devices, chosen when a run starts: batch sizes, what backward
keeps, and the fewest ranks that a micro-batch fits on.

``bucket_config`` may leave out batch sizes (None). They are chosen once, and a checkpoint has the
whole config with them. A run that resumes takes them from there, so its micro-batches are the same
on devices with more or less memory.

``grad_checkpoint="auto"`` chooses what blocks keep for backward, by the shape of each batch. It
changes no micro-batch, and is chosen anew at each start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.common.files import read_json
from opensora_sp.config import TrainConfig
from opensora_sp.data.bucket_plan import BucketPlan
from opensora_sp.data.buckets import Buckets, batch_sizes_of
from opensora_sp.data.sampler import BatchPlan
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.kernels.fused import current_kernels
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.parallel.rank_groups import group_sizes
from opensora_sp.planner.bucket_levels import BucketLevels, least_ranks, levels_for, plan_bucket
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.runtime.cost_models import cost_model_of

logger = logging.getLogger(__name__)


# Batch sizes


def provisional(cfg: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """The config for checks before a process group: recorded batch sizes, or one clip each."""
    cfg = recorded(cfg, checkpoint)
    names = _left_out(cfg)
    return cfg.with_batch_sizes(dict.fromkeys(names, 1)) if names else cfg


def recorded(cfg: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """The config with the batch sizes that a checkpoint's run has chosen.

    Raises:
        ValueError: if the checkpoint has none for a bucket.
    """
    names = _left_out(cfg)
    if checkpoint is None or not names:
        return cfg

    # Not chosen anew: other sizes would be other micro-batches, and the run would not resume
    # exactly.
    config: Mapping[str, Any] = read_json(checkpoint / "state.json").get("config", {})
    known = batch_sizes_of(config.get("bucket_config") or {})
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"got bucket_config without the batch size of {', '.join(unknown)}, which {checkpoint} "
            "lacks as well; expected the buckets of the run that is resumed; change them back, or "
            f"start a new run from these weights with --cfg-options load={checkpoint}"
        )
    return cfg.with_batch_sizes({name: known[name] for name in names})


def with_chosen_batch_sizes(
    cfg: TrainConfig,
    checkpoint: Path | None,
    mesh: SequenceMesh,
    device: torch.device,
    reserved: int,
) -> TrainConfig:
    """The config with a batch size for every bucket, the same on all ranks. Collective.

    Sizes are taken from the checkpoint. Without one, rank 0 chooses them by ``planner.fit`` for
    the smallest memory over ranks.

    Args:
        reserved: bytes of the device that encoders take.

    Raises:
        ValueError: on all ranks, if not one clip of a bucket fits.
    """
    names = _left_out(cfg)
    if not names:
        return cfg
    if checkpoint is not None:
        logger.info("batch sizes of the run are kept, as recorded in %s", checkpoint)
        return recorded(cfg, checkpoint)

    memory = available_memory(device, reserved)
    # On one rank: the fit takes seconds, and all ranks need the same sizes.
    chosen: list[dict[str, int]] = [{}]
    with on_rank_0("choosing batch sizes") as is_rank_0:
        if is_rank_0:
            chosen = [_fitted_sizes(cfg, mesh, memory, device, names)]
    dist.broadcast_object_list(chosen, src=0)

    return cfg.with_batch_sizes(chosen[0])


def _left_out(cfg: TrainConfig) -> list[str]:
    """Names of the buckets that have no batch size yet."""
    config = cfg.bucket_config
    return [] if config is None else Buckets.of(config).without_batch_size


def _fitted_sizes(
    cfg: TrainConfig, mesh: SequenceMesh, memory: float, device: torch.device, names: list[str]
) -> dict[str, int]:
    """Batch sizes of these buckets that fit into ``memory`` bytes, logged with their reasons."""
    # Runs whose config has all batch sizes start without it.
    from opensora_sp.planner.fit import fit

    fitted = fit(
        cfg,
        mesh.world_size,
        memory,
        names=names,
        gpus_per_node=mesh.ranks_per_node,
        device=device.type,
        cost_model=cost_model_of(cfg.cost_model),
    )
    logger.info(
        "batch sizes chosen for %.1f GB, the smallest memory of a device without the encoders, and "
        "micro-batches of about %.3g s; checkpoints keep them:",
        fitted.memory / 1e9,
        fitted.seconds,
    )
    for bucket in fitted.batches:
        clips = f"{bucket.name:>14} {bucket.batch.batch_size:6d} clips, {bucket.seconds:.3g} s"
        logger.info("%s, decided by %s", clips, bucket.decided_by)
    return fitted.sizes


# What backward keeps


class ActivationBudget:
    """Sets the levels of gradient checkpointing before each forward pass. Made collectively.

    With ``grad_checkpoint="auto"`` the levels of all buckets that have clips are planned here, each
    by one rank, and steps look them up (``levels_for``). A bucket that no clip falls into in any
    epoch decides nothing.

    Args:
        device: whose memory is shared by a training step and ``reserved`` bytes of encoders.
        buckets: names of the buckets with clips in some epoch; None for all.
        options: of sequence parallelism, as the model runs with them.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        module: ConditionedModel,
        mesh: SequenceMesh,
        device: torch.device,
        reserved: int,
        buckets: Container[str] | None,
        options: Options | None = None,
    ) -> None:
        self.cfg, self.module, self.mesh = cfg, module, mesh
        # Sizes of groups whose first batch is also computed without sequence parallelism.
        self._unverified = {group.sp_size for group in mesh.own if cfg.sequence_parallel.verify}
        if cfg.grad_checkpoint != "auto":
            module.set_grad_checkpoint(cfg.grad_checkpoint)
            return

        self._run = estimator_of(cfg, mesh, device, reserved, options)
        names = [name for name in cfg.batches() if buckets is None or name in buckets]
        self._planned = self._plan(names)

    def set_levels_for(self, latents: torch.Size) -> None:
        """Set the levels of recomputation for a batch of the mesh's current group.

        Args:
            latents: the batch's shape, ``(B, c, frames, height, width)``.
        """
        if self.cfg.grad_checkpoint != "auto":
            return
        ranks = self.mesh.sp_size
        if ranks in self._unverified:
            # Whole activations are kept in addition, so everything is recomputed this once.
            self._unverified.remove(ranks)
            self.module.set_grad_checkpoint(True)
            return
        shape = self._run.shape_of(tuple(latents))
        self.module.set_grad_checkpoint(levels_for(self._planned, shape, ranks))

    def _plan(self, names: Sequence[str]) -> list[BucketLevels]:
        """Plan the batches of these buckets, each on one rank. Collective."""
        mesh = self.mesh
        # A rank may have no bucket to plan, and gathers all the same.
        by_rank: list[list[BucketLevels]] = [[] for _ in range(mesh.world_size)]
        for name in names[mesh.rank :: mesh.world_size]:
            # Tracing takes seconds for each bucket, so ranks share the buckets.
            by_rank[mesh.rank] += plan_bucket(
                self._run, name, degrees_of_bucket(self.cfg, mesh, name)
            )
        if mesh.world_size > 1:
            dist.all_gather_object(by_rank, by_rank[mesh.rank])

        buckets = chain.from_iterable(by_rank)
        planned = sorted(buckets, key=lambda bucket: (bucket.name, bucket.ranks))
        for bucket in planned:
            ranks = f"{bucket.ranks} rank{'s' * (bucket.ranks > 1)}"
            logger.info("gradient checkpointing of %s on %s: %s", bucket.name, ranks, bucket.text)
        return planned


def degrees_of_bucket(cfg: TrainConfig, mesh: SequenceMesh, name: str) -> list[int]:
    """The numbers of ranks that may share a bucket's batches."""
    if isinstance(cfg.sp_size, dict) and name in cfg.sp_size:
        return [cfg.sp_size[name]]
    return group_sizes(mesh.family)


def buckets_with_clips(plan: BatchPlan) -> set[str] | None:
    """Names of the buckets that clips fall into in some epoch; None without buckets."""
    return plan.buckets_with_clips if isinstance(plan, BucketPlan) else None


# Memory


def estimator_of(
    cfg: TrainConfig,
    mesh: SequenceMesh,
    device: torch.device,
    reserved: int,
    options: Options | None,
) -> RunEstimator:
    """The planner's estimates on the smallest device, less ``reserved`` bytes. Collective."""
    memory = available_memory(device, reserved)
    run = RunEstimator(
        cfg, mesh.world_size, memory, device=device.type, gpus_per_node=mesh.ranks_per_node
    )
    if options is not None:
        # As the boosted model runs: without options that this device or model cannot use.
        run.options = options
    if device.type == "cuda":
        # Kernels that all ranks have verified: one that failed runs in plain torch, which keeps
        # more.
        run.kernels = current_kernels()
    return run


def available_memory(device: torch.device, reserved: int) -> float:
    """Bytes of the smallest device without ``reserved`` ones. Collective."""
    # The least over all ranks, which have to choose alike.
    least = torch.tensor(memory_of(device) - reserved, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU; on CPU this process's part of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    # Ranks without a launcher may be on any host.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return float(psutil.virtual_memory().total / ranks)


# The ranks that batches fit on


def fewest_ranks(
    cfg: TrainConfig, mesh: SequenceMesh, run: RunEstimator, buckets: Container[str] | None = None
) -> dict[str, int]:
    """By bucket, the fewest ranks whose memory its batches fit into.

    Args:
        buckets: names of the buckets with clips; None for all.

    Raises:
        ValueError: on all ranks, if the batches of a bucket fit on no group that they may run on.
    """
    least: dict[str, int] = {}
    lacking: list[str] = []
    for name, batch in cfg.batches().items():
        if buckets is not None and name not in buckets:
            continue
        sizes = degrees_of_bucket(cfg, mesh, name)
        ranks = least_ranks(run, batch, sizes)
        if ranks is None:
            plural = "s" * (max(sizes) > 1)
            lacking.append(f"{name} ({batch.batch_size} clips on {max(sizes)} rank{plural})")
        else:
            # Without buckets all micro-batches have one shape, whose name nobody asks for.
            least[name if cfg.bucket_config is not None else ""] = ranks

    # All buckets at once, so that one start shows everything to change.
    if lacking:
        raise ValueError(
            f"got {run.memory / 1e9:.2f} GB of a device, into which no batch of these fits: "
            f"{', '.join(lacking)}; expected batches that fit on a group of ranks; lower their "
            "batch sizes or raise their degrees in sp_size (opensora-sp plan CONFIG --fit "
            f"{run.memory / 1e9:.0f}GB chooses both), set grad_checkpoint='auto', or start more "
            "processes"
        )
    return least
