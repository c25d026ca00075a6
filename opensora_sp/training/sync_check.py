"""A check that ranks agree: on the weights, and within a group on its batches.

Working weights are whole on every rank (ZeRO gathers the trained ones after each step). They,
frozen weights and buffers must be equal everywhere, and each rank's part of the trained ones must
be its fp32 master weights, rounded. The batches of a sequence-parallel group must be the same on
its ranks, and others in each group.

Master weights, moments and EMA weights exist once, so there is nothing to compare them with.

Tensors are compared by digests. The bits of the elements are integers ``x_0, x_1, ...``, and the
digest is the sum of ``(2k + 1) * x_k`` modulo 2**64. For up to 2**32 elements of up to four bytes:

* An element that changes by ``d`` changes the digest by ``(2k + 1) * d``. That is no multiple of
  2**64, because the first factor is odd and ``0 < |d| < 2**32``.
* Swapping elements ``k`` and ``l`` changes it by ``2 * (k - l) * (x_l - x_k)``. The factors
  contain two at most 32 and 31 times, so this is no multiple of 2**64 either.

Elements of eight bytes count as two of four bytes, so each flipped bit changes the digest as well.
Sums of integers do not depend on their order, and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.checkpoint.zero_shards import NamedShards
from opensora_sp.models.quantized import stored_tensors
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import RankGroup

NamedDigests = list[tuple[str, Tensor]]

# Elements that are summed at a time, by the type of the device: few launches, or what caches hold.
# They take at most 20 bytes each in addition to the tensor, on CUDA 84 MB.
PIECE = {"cuda": 1 << 22, "cpu": 1 << 16}
# By the bytes of an element; larger ones are read as several integers.
_INTEGERS = {1: torch.int8, 2: torch.int16}
_ADVICE = (
    "resume from a checkpoint before this step with --resume PATH, and look for a faulty device "
    "or code that changes one rank alone"
)


class SyncCheck:
    """Compares digests of weights and batches between ranks, every so many steps. Collective.

    Each rank sends a digest for each tensor of the model and of its batches.

    Args:
        module: whose parameters and buffers are compared, by name.
        every: steps from one check to the next; 0 for none.
        shards: the master weights of this rank; None without a ZeRO optimizer.
    """

    def __init__(
        self, module: nn.Module, mesh: SequenceMesh, every: int, shards: NamedShards | None = None
    ) -> None:
        self.module, self.mesh, self.every, self.shards = module, mesh, every, shards
        # Tensors of the step's micro-batches in each group, with their digests.
        self._batches: dict[RankGroup, NamedDigests] = {}

    def due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def see(self, step: int, batch: Mapping[str, Any]) -> None:
        """Add the digests of a micro-batch of the current group, if the step is checked."""
        if self.due(step):
            digests = self._batches.setdefault(self.mesh.group, [])
            for name, tensor in batch.items():
                if isinstance(tensor, Tensor):
                    digests.append((name, digest(tensor)))

    def compare(self, step: int) -> None:
        """Compare weights and batches of a step, if it is checked; call it before the update.

        Raises:
            ValueError: on every rank, naming the first tensor that differs and the ranks where it
                does.
        """
        if not self.due(step):
            return
        batches, self._batches = self._batches, {}
        weights = self._replicated()
        unlike_masters = self._unlike_masters()
        digests = [digest(tensor) for tensor in weights.values()]
        columns = self._gathered([*digests, *unlike_masters.values()])

        for name, column in zip(weights, columns):
            if len(set(column)) > 1:
                raise _difference("weight", name, column, range(len(column)), step)
        for name, column in zip(unlike_masters, columns[len(weights) :], strict=True):
            if any(column):
                ranks = [rank for rank, differs in enumerate(column) if differs]
                raise ValueError(
                    f"got a part of the working weight {name!r} on ranks {ranks} that is not the "
                    f"fp32 master weight there, in step {step + 1}; expected that, rounded to the "
                    f"precision of the training; {_ADVICE}"
                )
        self._compare_batches(batches, step)

    def _replicated(self) -> dict[str, Tensor]:
        """The tensors that every rank has whole."""
        whole = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        replicated = {}
        for name, tensor in whole.items():
            for suffix, stored in stored_tensors(tensor).items():
                replicated[f"{name}{suffix}"] = stored
        return replicated

    def _unlike_masters(self) -> dict[str, Tensor]:
        """By trained weight, whether this rank's part differs from its master weight, ``[]``."""
        differs: dict[str, Tensor] = {}
        if self.shards is None:
            return differs
        for name, master in self.shards.master_weights.items():
            # ZeRO cuts a padded weight into equal parts by rank.
            begin = self.mesh.rank * master.numel()
            part = self.shards.working[name].detach().reshape(-1)[begin : begin + master.numel()]
            # The last parts may be padded.
            rounded = master[: part.numel()].to(part)
            differs[name] = (_bits(part) != _bits(rounded)).any()
        return differs

    def _gathered(self, numbers: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Each of the numbers ``[]`` on all ranks, by rank. Collective."""
        device = next(self.module.parameters()).device
        # One collective for all tensors: a check of hundreds of small ones would wait for the
        # network.
        local = torch.stack([number.to(device, torch.int64) for number in numbers])
        everywhere = local.new_empty(self.mesh.world_size * local.numel())
        dist.all_gather_into_tensor(everywhere, local)
        return list(zip(*everywhere.view(-1, local.numel()).tolist(), strict=True))

    def _compare_batches(self, batches: Mapping[RankGroup, NamedDigests], step: int) -> None:
        """Raise ValueError unless batches are equal in each group, and differ between groups."""
        local = {}
        for group, digests in batches.items():
            local[group] = [(name, int(number)) for name, number in digests]
        # With their names, since ranks are in different groups with different tensors.
        by_rank: list[dict[RankGroup, Any]] = [{}] * self.mesh.world_size
        dist.all_gather_object(by_rank, local)

        starts: dict[tuple[Any, ...], list[int]] = {}
        for group in self.mesh.family:
            in_group = [by_rank[rank].get(group, []) for rank in group.ranks]
            for tensors in zip(*in_group):
                if len(set(tensors)) > 1:
                    name, numbers = tensors[0][0], [number for _, number in tensors]
                    raise _difference("batch tensor", name, numbers, group.ranks, step)
            # Idle groups have no batch, and would all be alike.
            if in_group[0]:
                starts.setdefault(tuple(in_group[0]), []).append(group.start)

        for same in starts.values():
            if len(same) > 1:
                raise ValueError(
                    f"got the same batch on replicas that begin with ranks {same}, in step "
                    f"{step + 1}; expected another on each; correct the data loading, which gives "
                    "replicas the same clips and noise"
                )


def _difference(
    kind: str, name: str, digests: Sequence[int], ranks: Sequence[int], step: int
) -> ValueError:
    """The error for a tensor whose digests differ between ``ranks``."""
    # The majority is taken as right, so that the error names the device to look at.
    usual = max(digests, key=digests.count)
    alike = [rank for rank, number in zip(ranks, digests, strict=True) if number == usual]
    unlike = sorted(set(ranks).difference(alike))
    return ValueError(
        f"got another {kind} {name!r} on ranks {unlike} than on ranks {alike}, in step {step + 1}; "
        f"expected the same numbers; {_ADVICE}"
    )


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor, int64 ``[]`` on its device. The host does not wait for it."""
    total = None
    for number, piece in enumerate(_bits(tensor).split(PIECE[tensor.device.type])):
        first = number * PIECE[tensor.device.type]
        weights = torch.arange(
            2 * first + 1, 2 * (first + piece.numel()) + 1, 2, device=tensor.device
        )
        part = weights.mul_(piece).sum()
        total = part if total is None else total + part
    assert total is not None
    return total


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, ``[n]``."""
    integers = _INTEGERS.get(tensor.element_size(), torch.int32)
    return tensor.detach().reshape(-1).view(integers)
