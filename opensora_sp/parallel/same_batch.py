"""A check that all ranks of a group were called with inputs of the same shapes, before anything else is sent.

Split sizes follow from shapes alone, so ranks with different ones would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ledger import record
from .mesh import SequenceMesh


class SameBatch:
    """A forward pre-hook: one number, a digest of all shapes and dtypes, is compared between the ranks of the group.

    In every forward, since a rank that has seen its own shape before cannot know that another one has not. The number
    stays on the host, so a GPU never waits for it.
    """

    def __init__(self, mesh: SequenceMesh) -> None:
        self.mesh = mesh

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.mesh.is_imagined:
            return
        described = _describe(args, kwargs)
        number = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "big")
        both = torch.tensor([number, -number])
        record("check", backward=False, elements=2, element_size=8)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.mesh.host_group)
        if both[0] != -both[1]:
            self._refuse(model, described)

    def _refuse(self, model: nn.Module, described: str) -> None:
        seen: list[Any] = [None] * self.mesh.sp_size
        dist.all_gather_object(seen, described, group=self.mesh.host_group)
        told = "; ".join(f"rank {rank}: {inputs}" for rank, inputs in enumerate(seen))
        raise ValueError(
            f"got inputs of different shapes on the ranks of one sequence-parallel group ({told}); expected the same "
            f"batch on all of them; give {type(model).__name__} the batch of the group's data-parallel rank"
        )


def _describe(args: tuple, kwargs: dict[str, Any]) -> str:
    named = {**{str(place): value for place, value in enumerate(args)}, **dict(sorted(kwargs.items()))}
    return ", ".join(f"{name} {_describe_one(value)}" for name, value in named.items())


def _describe_one(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__
