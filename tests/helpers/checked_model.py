"""A small model cut by tokens, and the checker's report of it with other functions in places."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensora_sp.checker import Report, check_parallel


class Part(nn.Module):
    """Tokens of one rank; nothing is communicated but at the model's end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        # Casts that float64 parity must not see.
        hidden = torch.tanh(self.first(x).float()).to(torch.float32)
        return x + self.last(hidden.type_as(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(2))
        self.enter: Callable[[Tensor], Tensor] = lambda x: x
        self.leave: Callable[[Tensor], Tensor] = lambda x: x
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.leave(x)


class Gather(torch.autograd.Function):
    """All-gather of uneven parts of axis 1; backward takes the rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        parts = [x.new_empty(x.shape[0], size, *x.shape[2:]) for size in sizes]
        for rank, part in enumerate(parts):
            if rank == dist.get_rank():
                part.copy_(x)
            dist.broadcast(part, rank)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.split(ctx.sizes, 1)[dist.get_rank()].contiguous(), None


def cut_tokens(model: Model, length: int = 7) -> None:
    sizes = [len(part) for part in torch.arange(length).tensor_split(dist.get_world_size())]
    model.enter = lambda x: x.split(sizes, 1)[dist.get_rank()]
    model.leave = lambda x: Gather.apply(x, sizes)


def build() -> nn.Module:
    return Model()


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 7, 4)}


def apply(model: Model, group: Any) -> None:
    cut_tokens(model)


def check(
    num_ranks: int = 2, seconds: float = 30, dtype: str = "float64", **functions: Any
) -> Report:
    definition = {"build": build, "batch": batch, "apply": apply, **functions}
    return check_parallel(
        SimpleNamespace(**definition), ranks=num_ranks, seconds=seconds, dtype=dtype
    )
