"""The groups of processes that share micro-batches: replicas of one size, or a nested family."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from .rank_groups import RankGroup, fixed_groups, group_sizes, nested_groups
from .shutdown import report_uncaught_errors

AUTO: Literal["auto"] = "auto"
SequenceSize: TypeAlias = int | Literal["auto"]
"""Ranks that share a micro-batch: a number, or "auto" for a degree of each micro-batch."""


@dataclass(frozen=True)
class ImaginedGroup:
    """A process group without processes: nothing is sent, and exchanges return empty tensors."""

    sp_rank: int
    group_name = "imagined"

    def rank(self) -> int:
        return self.sp_rank

    def wait(self) -> None:
        """As the work of an exchange: nothing is in flight."""


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """A group of ranks that share micro-batches, as one of its members sees it.

    ``sp_group`` is its process group, ``host_group`` the one for tensors on the CPU. Both are None
    without processes, and for a single rank of a nested family, which sends nothing.
    """

    ranks: RankGroup
    sp_rank: int
    sp_group: Any
    host_group: Any
    spans_nodes: bool
    sp_size: int = field(init=False)

    def __post_init__(self) -> None:
        # A number: compiled blocks read it, and graphs end at properties of a named tuple.
        object.__setattr__(self, "sp_size", self.ranks.size)


class SequenceMesh:
    """All processes, and the groups of neighbouring ranks that share micro-batches.

    With a number as ``sp_size`` these are ``dp_size`` replicas of ``sp_size`` ranks each. Ranks
    with equal ``sp_rank`` (``dp_group``) hold different batches.

    With ``"auto"`` they are a nested family (``rank_groups.nested_groups``): from the whole world
    down to single ranks. Then ``dp_size`` is 1, ``dp_group`` None, and each micro-batch runs in
    ``using(group)``, where the group is one that this rank is a member of. All ranks must
    enter their groups from the largest to the smallest between two collectives of the world.

    ``sp_size``, ``sp_rank``, ``sp_group``, ``host_group`` and ``spans_nodes`` belong to the
    current group, whose ranks share a micro-batch and hold a part of its rows each. Outside of
    ``using`` that is this rank's replica, or the world with ``"auto"``. Without a process group
    there is one process, and process groups are None.

    Creating a mesh is collective: every rank of the world does it, in the same order. It also lets
    matrix products accumulate in fp32 in this process (``accumulate_in_fp32``), and an error that
    ends this process reach the other ranks (``report_failure``): runs, the plugin and
    ``parallelize`` need a mesh.

    Args:
        ranks_per_node: by which groups span nodes; by default the ranks on this node. Where nodes
            differ, all ranks pass the same number.

    Attributes:
        family: all groups of the world, the largest first.
        own: this rank's groups of the family, the largest first.

    Raises:
        ValueError: if ``sp_size`` does not divide the number of processes, or a launcher started
            several processes that have not joined a process group.
    """

    def __init__(self, sp_size: SequenceSize = 1, *, ranks_per_node: int | None = None) -> None:
        running = dist.is_available() and dist.is_initialized()
        if not running and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"got {os.environ['WORLD_SIZE']} processes without a process group; expected one; "
                "call colossalai.launch_from_torch() or torch.distributed.init_process_group() "
                "first"
            )

        world = dist.get_world_size() if running else 1
        check_sp_size(sp_size, world)
        accumulate_in_fp32()
        if running:
            report_uncaught_errors()
        self.world_size, self.rank = world, dist.get_rank() if running else 0
        # torchrun sets the number of ranks on this node; without it, there is one node.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self.ranks_per_node = ranks_per_node or ranks_here

        self.dp_group: Any = None
        if sp_size == AUTO:
            self.family = nested_groups(world, self.ranks_per_node)
            self.dp_size, self.dp_rank = 1, 0
        else:
            self.family = fixed_groups(world, sp_size)
            self.dp_size, self.dp_rank = world // sp_size, self.rank // sp_size
            self.dp_group = self._peers(sp_size)
        self.own = self._groups_of_rank(nested=sp_size == AUTO)
        self._current = self.own[0]

    @classmethod
    def imagined(cls, sp_size: int, sp_rank: int) -> SequenceMesh:
        """The mesh of one rank, without processes, to trace a model with fake tensors."""
        mesh = cls.__new__(cls)
        mesh.world_size = mesh.ranks_per_node = sp_size
        mesh.rank, mesh.dp_size, mesh.dp_rank = sp_rank, 1, 0
        group: Any = ImaginedGroup(sp_rank)
        mesh.dp_group = group
        mesh.family = fixed_groups(sp_size, sp_size)
        mesh.own = (SequenceGroup(mesh.family[0], sp_rank, group, group, spans_nodes=False),)
        mesh._current = mesh.own[0]
        return mesh

    @property
    def shares_batches(self) -> bool:
        """True if this rank is in a group of several ranks."""
        return self.own[0].sp_size > 1

    @property
    def is_imagined(self) -> bool:
        return isinstance(self.sp_group, ImaginedGroup)

    @contextmanager
    def using(self, group: RankGroup) -> Iterator[None]:
        """Inside, ``group`` is the current one: around forward and backward of a micro-batch.

        Raises:
            ValueError: if this rank is not a member of it, or the family does not have it.
        """
        member = next((member for member in self.own if member.ranks == group), None)
        if member is None:
            own_ranks = ", ".join(str(member.ranks) for member in self.own)
            raise ValueError(
                f"got {group} as the group of a micro-batch on rank {self.rank}; expected one of "
                f"its groups: {own_ranks}; pass a group of mesh.family with this rank as a member"
            )
        before, self._current = self._current, member
        try:
            yield
        finally:
            self._current = before

    @property
    def current(self) -> SequenceGroup:
        """The group of the micro-batch at hand."""
        return self._current

    @property
    def group(self) -> RankGroup:
        """The ranks of the current group."""
        return self._current.ranks

    @property
    def sp_size(self) -> int:
        return self._current.sp_size

    @property
    def sp_rank(self) -> int:
        return self._current.sp_rank

    @property
    def sp_group(self) -> Any:
        return self._current.sp_group

    @property
    def host_group(self) -> Any:
        return self._current.host_group

    @property
    def spans_nodes(self) -> bool:
        """True if the current group, or with a fixed size any replica, lies on several nodes."""
        return self._current.spans_nodes

    def __repr__(self) -> str:
        if len(self.own) > 1:
            return f"SequenceMesh('auto', sp_sizes={group_sizes(self.family)}, rank={self.rank})"
        return f"SequenceMesh(dp_size={self.dp_size}, sp_size={self.sp_size}, rank={self.rank})"

    def _groups_of_rank(self, *, nested: bool) -> tuple[SequenceGroup, ...]:
        """This rank's groups of the family, and communicators where they have several ranks.

        Every rank creates all of them, in the order of the family, so that torch names a group
        alike on its members. With ``use_local_synchronization`` it derives the name from how many
        groups a rank has, which may differ. Nobody waits in a cycle: members connect from the
        largest group to the smallest.
        """
        needs_twins = dist.is_initialized() and _needs_twin(dist.group.WORLD)
        rank_groups = []
        for ranks in self.family:
            sends = ranks.size > 1 or not nested
            sp_group = host_group = self._process_group(ranks.ranks) if sends else None
            if needs_twins and sends:
                host_group = self._process_group(ranks.ranks, host_backend())
            # Only after all groups of this range are made: the creation is collective.
            if self.rank not in ranks:
                continue

            if nested and needs_twins and sends:
                # NCCL connects ranks in the first all-to-all. Its memory is taken at the start.
                sent = torch.zeros(ranks.size, device="cuda")
                dist.all_to_all_single(torch.empty_like(sent), sent, group=sp_group)

            # Replicas of a fixed size choose alike.
            replicas = [ranks] if nested else self.family
            spans = any(replica.spans_nodes(self.ranks_per_node) for replica in replicas)
            sp_rank = self.rank - ranks.start
            rank_groups.append(SequenceGroup(ranks, sp_rank, sp_group, host_group, spans))
        return tuple(rank_groups)

    def _peers(self, sp_size: int) -> Any:
        """The process group of ranks with equal ``sp_rank``."""
        peers = [range(first, self.world_size, sp_size) for first in range(sp_size)]
        # All of them on every rank: creating a process group is collective over the world.
        return [self._process_group(ranks) for ranks in peers][self.rank % sp_size]

    def _process_group(self, ranks: range, backend: str | None = None) -> Any:
        """Create a process group, as every rank must; None without processes."""
        if not dist.is_initialized():
            return None
        # A second communicator of the same ranks would take memory of the device for nothing.
        if len(ranks) == self.world_size and backend is None:
            return dist.group.WORLD
        kind = "dp_size" if ranks.step > 1 else "sp_size"
        where = "" if backend is None else " on the host"
        return dist.new_group(
            list(ranks), backend=backend, group_desc=f"{kind} {len(ranks)}{where}"
        )


def spans_nodes(world_size: int, sp_size: int, ranks_per_node: int) -> bool:
    """True if any group of ``sp_size`` neighbouring ranks lies on more than one node."""
    return any(group.spans_nodes(ranks_per_node) for group in fixed_groups(world_size, sp_size))


def check_sp_size(sp_size: SequenceSize, world_size: int) -> None:
    """Raise ValueError unless the processes can be divided into groups of ``sp_size``."""
    if sp_size == AUTO:
        return
    if sp_size < 1 or world_size % sp_size:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"got sp_size {sp_size} with {world_size} processes; expected an sp_size that divides "
            f"the number of processes, one of {fitting}; change sp_size, or the number of "
            "processes (torchrun --nproc_per_node)"
        )


def _needs_twin(group: dist.ProcessGroup | None) -> bool:
    """True if the tensors of the host need another process group."""
    return "gloo" not in dist.get_backend_config(group)


def host_backend() -> str:
    """The default group's backend for tensors on the CPU, or gloo.

    A group initialised with "nccl" has none for the CPU, one with "cpu:gloo,cuda:nccl" has gloo.
    """
    for pair in dist.get_backend_config().split(","):
        device, _, backend = pair.partition(":")
        if device == "cpu":
            return backend
    return "gloo"


def accumulate_in_fp32() -> None:
    """Let cuBLAS add the partial sums of split matrix products in fp32, in the whole process.

    By torch's defaults it may add them in bf16 or fp16. The gradient of a weight is a sum over
    tokens, which is what cuBLAS splits.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
