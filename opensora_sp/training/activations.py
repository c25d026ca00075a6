"""``grad_checkpoint="auto"``: what blocks keep for backward, by the shape of each batch."""

from __future__ import annotations

import logging
import os

import psutil
import torch
import torch.distributed as dist

from opensora_sp.config import TrainConfig
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.planner import batch_memory
from opensora_sp.planner.communicators import communicator_memory

logger = logging.getLogger(__name__)


class ActivationBudget:
    """Sets the levels of gradient checkpointing before each forward pass. Made collectively.

    Args:
        module: the bare model.
        device: whose memory is shared by a training step and ``reserved`` bytes of encoders.
        options: of sequence parallelism, as the model runs with them.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        module: ConditionedModel,
        mesh: SequenceMesh,
        device: torch.device,
        reserved: int,
        options: Options | None = None,
    ) -> None:
        self.cfg, self.module, self.mesh, self.device = cfg, module, mesh, device
        self.options = options
        of_node = os.environ.get("LOCAL_WORLD_SIZE")  # as SequenceMesh reads it
        self._gpus_per_node = None if of_node is None else int(of_node)
        self.memory = 0.0
        self._levels: dict[tuple[int, ...], list[int]] = {}
        # Sizes of groups whose first batch is also computed without sequence parallelism.
        self._unverified = {own.sp_size for own in mesh.own if cfg.sequence_parallel.verify}
        if cfg.grad_checkpoint == "auto":
            self.memory = free_memory(mesh, device, reserved)
            # Of each process, before it pins any.
            self._of_host = _smallest(_share_of_host(psutil.virtual_memory().available), device)
        else:
            module.set_grad_checkpoint(cfg.grad_checkpoint)

    def fit(self, latents: torch.Size) -> None:
        """Let blocks keep as much as fits with a batch ``(B, c, frames, height, width)`` of the
        mesh's current group.

        Raises:
            ValueError: on all ranks, if that takes more of a host's memory than one has.
        """
        if self.cfg.grad_checkpoint != "auto":
            return
        ranks = self.mesh.sp_size
        if ranks in self._unverified:
            self._unverified.remove(ranks)
            self.module.set_grad_checkpoint(True)
            return

        shape = tuple(latents)
        key = (ranks, *shape)
        if key not in self._levels:
            planned = batch_memory(
                self.cfg,
                dist.get_world_size(),
                shape,
                memory_gb=self.memory / 1e9,
                device=self.device.type,
                gpus_per_node=self._gpus_per_node,
                options=self.options,
                # Blocks that failed verification run in eager mode, which keeps more.
                compiled=self.module.compile_backend is not None,
                ranks=ranks,
            )
            check_host(shape, planned.pinned, self._of_host)
            self._levels[key] = planned.levels
            logger.info("gradient checkpointing of %s: %s", shape, planned.describe())
        self.module.set_grad_checkpoint(self._levels[key])


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
    groups = [own.ranks for own in mesh.own[1:]]
    return communicator_memory(groups, mesh.ranks_per_node)


def check_host(shape: tuple[int, ...], pinned: int, available: float) -> None:
    """Raise ValueError if a process pins more bytes than a host has available for it."""
    if pinned > available:
        raise ValueError(
            f"got a batch {shape} that fits a GPU only with {pinned / 1e9:.3f} GB of inputs of "
            f"blocks in the host's memory for each process; expected at most "
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
