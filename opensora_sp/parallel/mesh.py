"""The dp x sp mesh of processes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from opensora_sp.backends import host_backend

from .numerics import accumulate_in_fp32


class ImaginedGroup:
    """A process group without processes: nothing is sent, and exchanges return empty tensors."""

    group_name = "imagined"

    def wait(self) -> None:
        """As the work of an exchange: nothing is in flight."""


class SequenceMesh:
    """All processes, arranged as ``dp_size`` replicas of ``sp_size`` neighbouring ranks each.

    The ranks of one replica (``sp_group``) share every batch and hold a part of its rows; ranks
    with equal ``sp_rank`` (``dp_group``) hold different batches. Without a process group there is
    one process, and both are None. ``spans_nodes``: whether any ``sp_group`` lies on several nodes.

    Creating a mesh is collective: every rank of the world does it, in the same order. It also lets
    matrix products accumulate in fp32 in this process (``accumulate_in_fp32``): runs, the plugin
    and ``parallelize`` need a mesh.

    Raises:
        ValueError: if ``sp_size`` does not divide the number of processes, or a launcher started
            several processes that have not joined a process group.
    """

    def __init__(self, sp_size: int = 1) -> None:
        running = dist.is_available() and dist.is_initialized()
        if not running and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"got {os.environ['WORLD_SIZE']} processes without a process group; expected one; "
                "call colossalai.launch_from_torch() or torch.distributed.init_process_group() "
                "first"
            )

        world = dist.get_world_size() if running else 1
        rank = dist.get_rank() if running else 0
        check_sp_size(sp_size, world)
        accumulate_in_fp32()
        self.world_size, self.rank = world, rank
        self.sp_size, self.dp_size = sp_size, world // sp_size
        self.dp_rank, self.sp_rank = divmod(rank, sp_size)

        replicas = [list(range(first, first + sp_size)) for first in range(0, world, sp_size)]
        peers = [list(ranks) for ranks in zip(*replicas, strict=True)]
        self.sp_group = _my_group(replicas, rank, world)
        self.dp_group = _my_group(peers, rank, world)

        # torchrun sets the number of ranks on this node; without it, there is one node.
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self.spans_nodes = spans_nodes(world, sp_size, of_node)

        # The ranks of sp_group, for tensors on the CPU.
        self.host_group = self.sp_group
        if self.sp_group is not None and "gloo" not in dist.get_backend_config(self.sp_group):
            self.host_group = _my_group(replicas, rank, world, backend=host_backend())

    @classmethod
    def imagined(cls, sp_size: int, sp_rank: int) -> SequenceMesh:
        """The mesh of one rank, without processes, to trace a model with fake tensors."""
        mesh = cls.__new__(cls)
        mesh.world_size, mesh.rank = sp_size, sp_rank
        mesh.sp_size, mesh.dp_size, mesh.sp_rank, mesh.dp_rank = sp_size, 1, sp_rank, 0
        mesh.spans_nodes = False
        group: Any = ImaginedGroup()
        mesh.sp_group = mesh.dp_group = mesh.host_group = group
        return mesh

    @property
    def is_imagined(self) -> bool:
        return isinstance(self.sp_group, ImaginedGroup)

    def __repr__(self) -> str:
        return f"SequenceMesh(dp_size={self.dp_size}, sp_size={self.sp_size}, rank={self.rank})"


def spans_nodes(world_size: int, sp_size: int, ranks_per_node: int) -> bool:
    """Whether any group of ``sp_size`` neighbouring ranks lies on more than one node."""
    for first in range(0, world_size, sp_size):
        last = first + sp_size - 1
        if first // ranks_per_node != last // ranks_per_node:
            return True
    return False


def check_sp_size(sp_size: int, world_size: int) -> None:
    """Raise ValueError unless the processes can be divided into groups of ``sp_size``."""
    if sp_size < 1 or world_size % sp_size:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"got sp_size {sp_size} with {world_size} processes; expected an sp_size that divides "
            f"the number of processes, one of {fitting}; change sp_size or the number of processes"
        )


def _my_group(
    groups: list[list[int]], rank: int, world: int, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create all groups (every rank must) and return the one of this rank."""
    if not dist.is_initialized():
        return None
    if len(groups[0]) == world and backend is None:
        return dist.group.WORLD

    own = None
    for ranks in groups:
        group = dist.new_group(ranks, backend=backend)
        own = group if rank in ranks else own
    return own
