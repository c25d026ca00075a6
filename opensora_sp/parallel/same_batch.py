"""A check that all ranks of a group were called with inputs of the same shapes, before anything else is sent.

Split sizes follow from shapes alone, so ranks with different ones would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from .ledger import record
from .mesh import SequenceMesh
from .waiting import communicating


class SameBatch:
    """A forward pre-hook: one number, a digest of all shapes and dtypes, is compared between the ranks of the group.

    In every forward, since a rank that has seen its own shape before cannot know that another one has not. The number
    stays on the host, so a GPU never waits for it.
    """

    def __init__(self, mesh: SequenceMesh, how: object = None) -> None:
        self.mesh, self.how = mesh, how  # the options by which ranks share batches, which have to agree as well

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mesh.is_imagined:
            return
        described = _describe(model, args, kwargs) + f", {self.how}"
        number = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "big")
        both = torch.tensor([number, -number])
        record("check", backward=False, elements=2, element_size=8)
        with communicating("check", both.device):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.mesh.host_group)
        if both[0] != -both[1]:
            self._refuse(model, described)

    def _refuse(self, model: nn.Module, described: str) -> None:
        seen: list[Any] = [None] * self.mesh.sp_size
        dist.all_gather_object(seen, described, group=self.mesh.host_group)
        told = "; ".join(f"rank {rank}: {inputs}" for rank, inputs in enumerate(seen))
        raise ValueError(
            f"got inputs of different shapes on the ranks of one sequence-parallel group ({told}); expected the same "
            f"batch, shared by the same options, on all of them; give {type(model).__name__} the batch of the group's "
            "data-parallel rank"
        )


def _describe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Whatever decides what is sent: shapes and dtypes, also inside of containers, plain values, and modes."""
    leaves, _ = tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
    told = [f"{_name(path)} {_describe_one(value)}" for path, value in leaves]
    modes = dict(training=model.training, grad=torch.is_grad_enabled())
    if hasattr(model, "grad_checkpoint"):
        modes["grad_checkpoint"] = bool(model.grad_checkpoint)
    return ", ".join([*told, *(f"{name} {value}" for name, value in modes.items())])


def _name(path: tuple[Any, ...]) -> str:
    """``x`` for a keyword, ``0`` for a place, ``frames[1]`` for what lies deeper."""
    first, *deeper = (getattr(key, "key", getattr(key, "idx", key)) for key in path[1:])
    return f"{first}{''.join(f'[{key}]' for key in deeper)}"


def _describe_one(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe_one, value))}]"
    if isinstance(form := getattr(value, "shared_form", None), str):  # encoded text, of which ranks hold their part
        return form
    if is_dataclass(value):
        return f"{type(value).__name__} {' '.join(_describe_one(getattr(value, one.name)) for one in fields(value))}"
    return type(value).__name__
