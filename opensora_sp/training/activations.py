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
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.planner.bucket_levels import BucketLevels, plan_bucket
from opensora_sp.planner.communicators import memory_beside_largest
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.rank_groups import group_sizes

logger = logging.getLogger(__name__)


class ActivationBudget:
    """Sets the levels of gradient checkpointing before each forward pass. Made collectively.

    With ``grad_checkpoint="auto"`` the levels of all buckets that have clips are planned here, each
    by one rank. A bucket that no clip falls into in any epoch decides nothing.

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
        self.cfg, self.module, self.mesh, self.device = cfg, module, mesh, device
        # Sizes of groups whose first batch is also computed without sequence parallelism.
        self._unverified = {own.sp_size for own in mesh.own if cfg.sequence_parallel.verify}
        # By the number of ranks and the size of a clip's latents.
        self._planned: dict[tuple[int, ...], BucketLevels] = {}
        self._logged: set[tuple[str, int]] = set()
        if cfg.grad_checkpoint != "auto":
            module.set_grad_checkpoint(cfg.grad_checkpoint)
            return

        self.memory = free_memory(mesh, device, reserved)
        # Of each process, before it pins any.
        self._of_host = _smallest(_share_of_host(psutil.virtual_memory().available), device)
        self._run = estimator_of(cfg, mesh, self.memory, device, options)
        names = [name for name in batches_by_name(cfg) if buckets is None or name in buckets]
        self._plan(names)

    def fit(self, latents: torch.Size, num_frames: int) -> None:
        """Let blocks keep as much as fits with a batch ``(B, c, frames, height, width)`` of the
        mesh's current group, of videos of ``num_frames`` frames.
        """
        if self.cfg.grad_checkpoint != "auto":
            return
        ranks = self.mesh.sp_size
        if ranks in self._unverified:
            self._unverified.remove(ranks)
            self.module.set_grad_checkpoint(True)
            return

        num_samples, *size = latents
        planned = self._planned.get((ranks, *size))
        if planned is None or num_samples > planned.num_samples:
            planned = self._add_unplanned(tuple(latents), ranks, num_frames)
        if (planned.name, ranks) not in self._logged:
            self._logged.add((planned.name, ranks))
            of_ranks = f"{ranks} rank{'s' * (ranks > 1)}"
            logger.info(
                "gradient checkpointing of %s on %s: %s", planned.name, of_ranks, planned.text
            )
        self.module.set_grad_checkpoint(planned.levels)

    def _plan(self, names: Sequence[str]) -> None:
        """Plan the batches of these buckets, each on one rank. Collective."""
        began, mesh = time.perf_counter(), self.mesh
        own: list[BucketLevels] = []
        for name in names[mesh.rank :: mesh.world_size]:
            own += plan_bucket(self._run, name, self._degrees(name), self.memory)

        seen = [own]
        if mesh.world_size > 1:
            seen = [[] for _ in range(mesh.world_size)]
            dist.all_gather_object(seen, own)
        for one in sorted(chain.from_iterable(seen), key=lambda one: (one.name, one.ranks)):
            check_host(one, self._of_host)
            for size in one.sizes:
                # Buckets of the same size may differ in their batches.
                key = one.ranks, *size
                known = self._planned.get(key, one)
                self._planned[key] = max(known, one, key=lambda other: other.num_samples)

        seconds = time.perf_counter() - began
        logger.info("gradient checkpointing planned for %d buckets in %.1f s", len(names), seconds)

    def _degrees(self, name: str) -> list[int]:
        """The numbers of ranks that may share a bucket's batches."""
        if isinstance(self.cfg.sp_size, dict) and name in self.cfg.sp_size:
            return [self.cfg.sp_size[name]]
        return group_sizes(self.mesh.family)

    def _add_unplanned(self, latents: tuple[int, ...], ranks: int, num_frames: int) -> BucketLevels:
        """Plan a batch of a size that the config does not have, when it comes."""
        # Derived models may have inputs of each frame of the video.
        known = self._run.video_frames.get(latents[2:], 0)
        self._run.video_frames[latents[2:]] = max(known, num_frames)
        found = self._run.memory(latents, ranks, brief=True)
        planned = BucketLevels(
            str(latents), ranks, [latents], found.levels, found.pinned, found.describe()
        )
        check_host(planned, self._of_host)
        self._planned[(ranks, *latents[1:])] = planned
        return planned


def estimator_of(
    cfg: TrainConfig,
    mesh: SequenceMesh,
    memory: float,
    device: torch.device,
    options: Options | None,
) -> RunEstimator:
    """The planner's estimates for a model as it runs, of ``memory`` bytes of a device."""
    run = RunEstimator(cfg, mesh.world_size, memory / 1e9, device.type, None, mesh.ranks_per_node)
    if options is not None:
        run.options = options
    if device.type == "cuda":
        # Those that all ranks have verified: a kernel that failed runs in plain torch, which keeps
        # more.
        run.kernels = current_kernels()
    return run


def free_memory(mesh: SequenceMesh, device: torch.device, reserved: int) -> float:
    """Bytes of the smallest device beside ``reserved`` ones and communicators. Collective."""
    return _smallest(memory_of(device) - reserved - _of_communicators(mesh, device), device)


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU; on CPU this process's part of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _share_of_host(psutil.virtual_memory().total)


def _of_communicators(mesh: SequenceMesh, device: torch.device) -> float:
    """Bytes of this rank's communicators but one, which the planner's budget leaves room for."""
    if device.type != "cuda":
        return 0.0
    return memory_beside_largest([own.ranks for own in mesh.own], mesh.ranks_per_node)


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
