"""A check that ranks agree: on the weights, and within a group on its batches.

Working weights are whole on every rank (ZeRO gathers the trained ones after each step). They,
frozen weights and buffers must be equal everywhere, and each rank's part of the trained ones must
be its fp32 master weights, rounded. The batches of a sequence-parallel group must be the same on
its ranks, and others in each group.

Master weights, moments and EMA weights exist once, so there is nothing to compare them with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.checkpoint import NamedShards
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import RankGroup, groups_with

from .digest import digest

Batches: TypeAlias = dict[RankGroup, list[tuple[str, Tensor]]]

_ADVICE = (
    "resume from a checkpoint before this step with --resume PATH, and look for a faulty device "
    "or code that changes one rank alone"
)


class SyncCheck:
    """Compares digests of weights and batches between ranks, every so many steps.

    Three numbers of each rank, or two and one for each of its groups, are computed on its device
    and gathered from all, and the host reads them once. Where they differ, the digests of single
    tensors are gathered, to find the first that differs. Collective.

    Args:
        module: whose parameters and buffers are compared, by name.
        every: steps from one check to the next; 0 for none.
        shards: the master weights of this rank; None without a ZeRO optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: SequenceMesh,
        every: int,
        shards: NamedShards | None = None,
    ) -> None:
        self.module, self.mesh, self.every, self.shards = module, mesh, every, shards
        self.cost: dict[str, float] = {
            "checks": 0,
            "bytes_read": 0,
            "bytes_sent": 0,
            "seconds": 0.0,
        }
        # Tensors of the step's micro-batches in each group, with their digests.
        self._batches: Batches = {}
        # Of each group, how many larger ones contain it.
        self._levels: dict[RankGroup, int] = {}
        for rank in range(mesh.world_size):
            self._levels |= {one: n for n, one in enumerate(groups_with(rank, mesh.family))}

    def due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def see(self, step: int, batch: Mapping[str, Any]) -> None:
        """Add the digests of a micro-batch of the current group, if the step is checked."""
        if self.due(step):
            tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
            with self._timed():
                self._batches.setdefault(self.mesh.group, []).extend(self._digests(tensors))

    def compare(self, step: int) -> None:
        """Compare weights and batches of a step, if it is checked; call it before the update.

        Raises:
            ValueError: on every rank, naming the first tensor that differs and the ranks where it
                does.
        """
        if not self.due(step):
            return
        with self._timed():
            tensors = self._replicated()
            weights = self._digest(tensors)
            batches, self._batches = self._batches, {}
            of_groups = [_combined(batches.get(one.ranks, []), weights) for one in self.mesh.own]
            # Ranks may be in different numbers of groups.
            missing = max(self._levels.values()) + 1 - len(of_groups)
            of_groups += [torch.zeros_like(weights)] * missing
            own = torch.stack([weights, self._unlike_masters(), *of_groups])

            of_all = own.new_empty(own.numel() * self.mesh.world_size)
            dist.all_gather_into_tensor(of_all, own)
            of_weights, of_masters, *of_batches = of_all.view(-1, own.numel()).T.tolist()
        self.cost["bytes_sent"] += own.nbytes * (self.mesh.world_size - 1)
        self.cost["checks"] += 1

        everyone = range(self.mesh.world_size)
        if len(set(of_weights)) > 1:
            self._refuse("weight", self._digests(tensors), everyone, step)
            self._refuse_once("weights", of_weights, step)
        if any(of_masters):
            self._refuse_part(step)
            self._refuse_once("parts of weights", of_masters, step)
        self._compare_batches(of_batches, batches, step)

    def _compare_batches(self, of_all: list[list[int]], batches: Batches, step: int) -> None:
        """Raise ValueError unless batches are equal in each group, and differ between groups.

        Args:
            of_all: for each level, from a rank's largest group on, the digest of each rank.
        """
        firsts = []
        for group in self.mesh.family:
            found = of_all[self._levels[group]][group.start : group.stop]
            if len(set(found)) > 1:
                self._refuse("batch tensor", batches.get(group, []), group.ranks, step)
            firsts.append(found[0])

        # Zero stands for no batch.
        same = []
        for group, first in zip(self.mesh.family, firsts, strict=True):
            if first and firsts.count(first) > 1:
                same.append(group.start)
        if same:
            raise ValueError(
                f"got the same batch on replicas that begin with ranks {same}, in step {step + 1}; "
                "expected another on each; correct the data loading, which gives replicas the same "
                "clips and noise"
            )

    def _replicated(self) -> dict[str, Tensor]:
        """What must be equal on all ranks, by name."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _unlike_masters(self) -> Tensor:
        """Zero, ``[]``, if this rank's part of the working weights is its master weights."""
        if self.shards is None:
            return torch.zeros((), dtype=torch.int64, device=self._device)

        working, master = {}, {}
        for name in self.shards.working:
            working[name], master[name] = self._own_part(name)
        dtype = next(iter(working.values())).dtype
        return self._digest(working) - self._digest(master, dtype).to(self._device)

    def _own_part(self, name: str) -> tuple[Tensor, Tensor]:
        """This rank's part of a working weight, and of its master weight, ``[n]`` each."""
        assert self.shards is not None
        master, whole = self.shards.master_weights[name], self.shards.working[name].detach()
        begin = self.mesh.rank * master.numel()
        working = whole.reshape(-1)[begin : begin + master.numel()]
        # The last parts may be padded.
        return working, master[: working.numel()]

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _digest(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        self.cost["bytes_read"] += sum(tensor.nbytes for tensor in tensors.values())
        return digest(tensors.values(), dtype)

    def _digests(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        return [(name, self._digest({name: tensor})) for name, tensor in tensors.items()]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.cost["seconds"] += time.perf_counter() - start

    def _refuse(
        self, kind: str, digests: list[tuple[str, Tensor]], ranks: Sequence[int], step: int
    ) -> None:
        """Raise on all ranks, naming the first tensor that differs in ``ranks``, if one does.

        Collective.
        """
        seen = _gathered([(name, int(value)) for name, value in digests])
        by_tensor = zip(*(seen[rank] for rank in ranks))
        column = next((column for column in by_tensor if len(set(column)) > 1), None)
        if column is None:
            return
        name = column[0][0]

        usual = max(column, key=column.count)
        other = [rank for rank, value in zip(ranks, column, strict=True) if value != usual]
        where = f"on ranks {other} than on the rest of ranks {list(ranks)}"
        if 2 * len(other) >= len(column):
            other = self._unlike_whole_masters(name)
            where = f"on ranks {other} than their fp32 master weights"
        if not 0 < len(other) < len(column):
            where = f"on each half of ranks {list(ranks)}"

        raise ValueError(
            f"got another {kind} {name!r} {where}, in step {step + 1}; expected the same numbers; "
            f"{_ADVICE}"
        )

    def _unlike_whole_masters(self, name: str) -> list[int]:
        """Ranks where a trained weight is not that of all master weights, rounded. Collective."""
        if self.shards is None or name not in self.shards.working:
            return []
        working = self.shards.working[name]
        whole = self.shards.whole(name, self.shards.master_weights[name])
        differs = bool(digest([working]) != digest([whole], working.dtype))
        return [rank for rank, found in enumerate(_gathered(differs)) if found]

    def _refuse_part(self, step: int) -> None:
        """Raise on all ranks, naming a part that is not its master weights, if any. Collective."""
        assert self.shards is not None
        own: str | None = None
        for name in self.shards.working:
            working, master = self._own_part(name)
            if digest([working]) != digest([master], working.dtype).to(working.device):
                own = name
                break

        found = _gathered(own)
        first = next((name for name in found if name is not None), None)
        if first is None:
            return
        ranks = [rank for rank, other in enumerate(found) if other == first]
        raise ValueError(
            f"got a part of the working weight {first!r} on ranks {ranks} that is not the fp32 "
            f"master weight there, in step {step + 1}; expected that, rounded to the precision of "
            f"the training; {_ADVICE}"
        )

    def _refuse_once(self, what: str, digests: Sequence[int], step: int) -> None:
        """Raise where digests of the step differ, and those computed again do not."""
        usual = max(digests, key=digests.count)
        ranks = [rank for rank, value in enumerate(digests) if value != usual]
        raise ValueError(
            f"got other {what} on ranks {ranks} in step {step + 1}, and equal ones when they were "
            "read again; expected the same numbers each time; look for a faulty device there, and "
            "resume from a checkpoint before this step with --resume PATH"
        )


def _gathered(own: Any) -> list[Any]:
    """The value of each rank. Collective."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, own)
    return seen


def _combined(digests: list[tuple[str, Tensor]], like: Tensor) -> Tensor:
    """One number of all digests and their order, int64 ``[]``; zero for none."""
    if not digests:
        return torch.zeros_like(like)
    values = torch.stack([value.to(like.device) for _, value in digests])
    # Odd weights, so that each digest counts; products and sums wrap around.
    weights = torch.arange(1, 2 * len(digests), 2, device=like.device)
    return (values * weights).sum()
