"""``grad_checkpoint="auto"``: what blocks keep for backward, by the shape of each batch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Sequence
from itertools import chain

import psutil
import torch
import torch.distributed as dist

from opensora_sp.config import TrainConfig
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.kernels import current_kernels
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.parallel.rank_groups import group_sizes
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.planner.bucket_levels import BucketLevels, levels_for, plan_bucket
from opensora_sp.planner.run_estimator import RunEstimator

logger = logging.getLogger(__name__)


class ActivationBudget:
    """Sets the levels of gradient checkpointing before each forward pass. Made collectively.

    With ``grad_checkpoint="auto"`` the levels of all buckets that have clips are planned here, each
    by one rank, and steps look them up (``levels_for``). A bucket that no clip falls into in any
    epoch decides nothing.

    Args:
        module: the bare model.
        device: whose memory is shared by a training step and ``reserved`` bytes of encoders.
        buckets: names of those with clips in some epoch; None for all.
        options: of sequence parallelism, as the model runs with them.

    Raises:
        ValueError: on all ranks, if a bucket's batches take more of a host's memory than one has.
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
        self._unverified = {own.sp_size for own in mesh.own if cfg.sequence_parallel.verify}
        if cfg.grad_checkpoint != "auto":
            module.set_grad_checkpoint(cfg.grad_checkpoint)
            return

        # Of each process, before it pins any.
        of_host = _smallest(_share_of_host(psutil.virtual_memory().available), device)
        self._run = estimator_of(cfg, mesh, device, reserved, options)
        names = [name for name in batches_by_name(cfg) if buckets is None or name in buckets]
        self._planned = self._plan(names)
        for bucket in self._planned:
            check_host(bucket, of_host)

    def fit(self, latents: torch.Size) -> None:
        """Set the levels of a batch ``(B, c, frames, height, width)`` of the mesh's current
        group.
        """
        if self.cfg.grad_checkpoint != "auto":
            return
        ranks = self.mesh.sp_size
        if ranks in self._unverified:
            self._unverified.remove(ranks)
            self.module.set_grad_checkpoint(True)
            return
        shape = self._run.shape_of(tuple(latents))
        self.module.set_grad_checkpoint(levels_for(self._planned, shape, ranks))

    def _plan(self, names: Sequence[str]) -> list[BucketLevels]:
        """Plan the batches of these buckets, each on one rank. Collective."""
        began, mesh = time.perf_counter(), self.mesh
        by_rank: list[list[BucketLevels]] = [[] for _ in range(mesh.world_size)]
        for name in names[mesh.rank :: mesh.world_size]:
            by_rank[mesh.rank] += plan_bucket(self._run, name, self._degrees(name))
        if mesh.world_size > 1:
            dist.all_gather_object(by_rank, by_rank[mesh.rank])

        planned = sorted(chain.from_iterable(by_rank), key=lambda one: (one.name, one.ranks))
        for bucket in planned:
            ranks = f"{bucket.ranks} rank{'s' * (bucket.ranks > 1)}"
            logger.info("gradient checkpointing of %s on %s: %s", bucket.name, ranks, bucket.text)
        seconds = time.perf_counter() - began
        logger.info("gradient checkpointing planned for %d buckets in %.1f s", len(names), seconds)
        return planned

    def _degrees(self, name: str) -> list[int]:
        """The numbers of ranks that may share a bucket's batches."""
        if isinstance(self.cfg.sp_size, dict) and name in self.cfg.sp_size:
            return [self.cfg.sp_size[name]]
        return group_sizes(self.mesh.family)


def estimator_of(
    cfg: TrainConfig,
    mesh: SequenceMesh,
    device: torch.device,
    reserved: int,
    options: Options | None,
) -> RunEstimator:
    """The planner's estimates for a model as it runs, on the smallest device beside ``reserved``
    bytes of encoders. Collective.
    """
    memory = free_memory(device, reserved)
    run = RunEstimator(
        cfg, mesh.world_size, memory, device=device.type, gpus_per_node=mesh.ranks_per_node
    )
    if options is not None:
        run.options = options
    if device.type == "cuda":
        # Those that all ranks have verified: a kernel that failed runs in plain torch, which keeps
        # more.
        run.kernels = current_kernels()
    return run


def free_memory(device: torch.device, reserved: int) -> float:
    """Bytes of the smallest device beside ``reserved`` ones. Collective."""
    return _smallest(memory_of(device) - reserved, device)


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU; on CPU this process's part of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _share_of_host(psutil.virtual_memory().total)


def check_host(planned: BucketLevels, available: float) -> None:
    """Raise ValueError if a process pins more bytes than a host has available for it."""
    if planned.pinned > available:
        raise ValueError(
            f"got batches of {planned.name} that fit a GPU only with {planned.pinned / 1e9:.3f} GB "
            "of inputs of blocks in the host's memory for each process; expected at most "
            f"{available / 1e9:.3f} GB, a process's part of what is available on the smallest "
            "host; raise sp_size, start fewer processes on a host, or take smaller batches"
        )


def _share_of_host(memory: int) -> float:
    """Of this process among those of its host; ranks that no launcher started may be on any."""
    return memory / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _smallest(memory: float, device: torch.device) -> float:
    """The least over all ranks, which have to choose alike."""
    least = torch.tensor(memory, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)
