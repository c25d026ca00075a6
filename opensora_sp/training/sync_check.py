"""A check that ranks agree: on the weights, and within a group on its batches.

The working weights are whole on every rank (ZeRO gathers the trained ones after each step) and must
be equal everywhere. A batch must be the same on the ranks of a sequence-parallel group, and another
one on each replica.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.parallel import SequenceMesh

# Odd, so that no sum is lost; Knuth, MMIX.
_MULTIPLIER = 6364136223846793005


class SyncCheck:
    """Compares fingerprints of weights and batches between ranks, every so many steps.

    Each tensor is read once and summed as integers, and the sums are combined to one number. The
    numbers of weights and batches are gathered from all ranks. Where they differ, the tensors' own
    sums are gathered to find the first tensor that differs. Collective.

    Args:
        module: whose parameters and buffers are compared, by name.
        every: steps from one check to the next; 0 for none.
    """

    def __init__(self, module: nn.Module, mesh: SequenceMesh, every: int) -> None:
        self.module, self.mesh, self.every = module, mesh, every
        self.cost: dict[str, float] = {
            "checks": 0,
            "bytes_read": 0,
            "bytes_sent": 0,
            "seconds": 0.0,
        }
        self._batches: list[tuple[str, Tensor]] = []

    def due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def see(self, step: int, batch: Mapping[str, Any]) -> None:
        """Add the fingerprint of a micro-batch of this replica, if the step is checked."""
        if self.due(step):
            tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
            with self._timed():
                self._batches += self._sums(tensors)

    def compare(self, step: int) -> None:
        """Compare weights and batches of a step, if it is checked; call it before the update.

        Raises:
            ValueError: on every rank, naming the first tensor that differs and the ranks where it
                does.
        """
        if not self.due(step):
            return
        with self._timed():
            module = self.module
            weights = self._sums(dict(module.named_parameters()) | dict(module.named_buffers()))
            batches, self._batches = self._batches, []
            device = weights[0][1].device
            own = torch.stack([_combined(weights, device), _combined(batches, device)])

            of_all = own.new_empty(2 * self.mesh.world_size)
            dist.all_gather_into_tensor(of_all, own)
            of_weights, of_batches = of_all.view(-1, 2).T.tolist()
        self.cost["bytes_sent"] += own.nbytes * (self.mesh.world_size - 1)
        self.cost["checks"] += 1

        if len(set(of_weights)) > 1:
            self._refuse("weight", weights, range(self.mesh.world_size), step)
        size = self.mesh.sp_size
        firsts = of_batches[::size]
        for replica, first in enumerate(firsts):
            ranks = range(replica * size, (replica + 1) * size)
            if any(of_batches[rank] != first for rank in ranks):
                self._refuse("batch tensor", batches, ranks, step)

        # Zero stands for no batch.
        same = []
        for replica, first in enumerate(firsts):
            if first and firsts.count(first) > 1:
                same.append(replica * size)
        if same:
            raise ValueError(
                f"got the same batch on replicas that begin with ranks {same}, in step {step + 1}; "
                "expected another on each; correct the data loading, which gives replicas the same "
                "clips and noise"
            )

    def _sums(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        self.cost["bytes_read"] += sum(tensor.nbytes for tensor in tensors.values())
        return [(name, fingerprint(tensor)) for name, tensor in tensors.items()]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.cost["seconds"] += time.perf_counter() - start

    def _refuse(self, kind: str, sums: list[tuple[str, Tensor]], ranks: range, step: int) -> None:
        """Raise on all ranks, naming the first tensor that differs in ``ranks``. Collective."""
        own = [(name, int(value)) for name, value in sums]
        seen: list[list[tuple[str, int]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(seen, own)

        by_tensor = zip(*(seen[rank] for rank in ranks))
        column = next(column for column in by_tensor if len(set(column)) > 1)
        usual = max(column, key=column.count)
        other = [rank for rank, value in zip(ranks, column, strict=True) if value != usual]
        raise ValueError(
            f"got another {kind} {usual[0]!r} on ranks {other} than on the rest of ranks "
            f"{list(ranks)}, in step {step + 1}; expected the same numbers; resume from a "
            "checkpoint before this step with --resume PATH, and look for a faulty device or code "
            "that changes one rank alone"
        )


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The bytes of a tensor summed as integers, int64 ``[]`` on its device.

    Integer sums are exact in any order.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    return data[:whole].view(torch.int64).sum() + data[whole:].sum() * 257


def _combined(sums: list[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """One number of all sums and their order, int64 ``[]``; zero for none."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    values = torch.stack([zero, *(value.to(device) for _, value in sums)])
    # Products and sums wrap around.
    weights = torch.full_like(values, _MULTIPLIER).cumprod(0)
    return (values * weights).sum()
