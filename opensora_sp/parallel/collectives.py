"""The collectives of sequence parallelism, each with its exact adjoint as backward.

All are ``all_to_all_single`` with split sizes that every rank knows beforehand. Ranks without rows
call them too. ``exchange`` is a registered operator, by which selective checkpointing and the
planner know it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .debug.comm_counter import record
from .debug.comm_timing import communicating
from .layout import ExchangePlan
from .mesh import ImaginedGroup
from .typed import once_differentiable, uncompiled


def all_to_all(
    x: Tensor,
    send: list[int],
    recv: list[int],
    group: dist.ProcessGroup | ImaginedGroup,
    *,
    kind: str,
    backward: bool,
    async_op: bool = False,
) -> tuple[Tensor, dist.Work | None]:
    """Entries ``[sum(send), ...]`` cut by receiver -> ``[sum(recv), ...]`` in order of the sender.

    With ``async_op`` the exchange is in flight until the work returned completes, and ``x`` must
    live as long.
    """
    out = x.new_empty(sum(recv), *x.shape[1:])
    if isinstance(group, ImaginedGroup):
        return out, cast(dist.Work, group)

    to_others = sum(send) - send[dist.get_rank(group)]
    elements = to_others * x[:1].numel()
    record(kind, backward=backward, elements=elements, element_size=x.element_size())

    x = x.contiguous()
    if async_op:
        return out, dist.all_to_all_single(out, x, recv, send, group=group, async_op=True)
    with communicating(kind, x.device, backward=backward):
        dist.all_to_all_single(out, x, recv, send, group=group)
    return out, None


_SCHEMA = (
    "(Tensor tokens, Tensor pack, Tensor place, int[] send, int[] recv, str group, str kind, "
    "bool backward) -> Tensor"
)


def _exchange_now(
    tokens: Tensor,
    pack: Tensor,
    place: Tensor,
    send: list[int],
    recv: list[int],
    group: str,
    kind: str,
    backward: bool,
) -> Tensor:
    """One copy to order tokens by receiver, one all-to-all, one copy to put what arrives in
    place.
    """
    # Operators take no group objects.
    process_group = dist.distributed_c10d._resolve_process_group(group)
    packed = tokens.index_select(0, pack)
    received, _ = all_to_all(packed, send, recv, process_group, kind=kind, backward=backward)
    return torch.empty_like(received).index_copy_(0, place, received)


_exchange = torch.library.custom_op(
    "opensora_sp::exchange", _exchange_now, mutates_args=(), schema=_SCHEMA
)


_exchange.register_fake(
    lambda tokens, pack, place, *_: tokens.new_empty(len(place), *tokens.shape[1:])
)


def _save_plan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, pack, place, *ctx.others = inputs
    ctx.save_for_backward(pack, place)


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """An exchange permutes tokens over the ranks, so its adjoint is the exchange in reverse."""
    pack, place = ctx.saved_tensors
    send, recv, group, kind, backward = ctx.others
    back = _exchange(grad.contiguous(), place, pack, recv, send, group, kind, not backward)
    return back, *[None] * 7


_exchange.register_autograd(_exchange_back, setup_context=_save_plan)

# A dispatch mode that is entered around each exchange.
NO_MODE: AbstractContextManager[Any] = nullcontext()
_mode = ContextVar("mode", default=NO_MODE)


@uncompiled  # communication runs between compiled graphs
def exchange(
    tokens: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    *,
    kind: str = "switch",
    reverse: bool = False,
) -> Tensor:
    """Exchange entries ``[n, C]`` held in one layout for those held in the other, ``[n', C]``, by
    this rank's plan.

    ``kind`` is what a ``CommLedger`` files it under; ``reverse`` undoes the plan.
    """
    there = plan.pack, plan.place, plan.send_splits, plan.recv_splits
    back = plan.place, plan.pack, plan.recv_splits, plan.send_splits
    with _mode.get():
        exchanged: Tensor = _exchange(
            tokens, *(back if reverse else there), group.group_name, kind, reverse
        )
    return exchanged


def keep_exchanged() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of forward and of recomputation, for ``torch.utils.checkpoint``.

    The first keeps what exchanges return, so that the second sends nothing again.
    """
    modes = create_selective_checkpoint_contexts([torch.ops.opensora_sp.exchange.default])
    keeping, reusing = map(_AroundExchanges, modes)
    return keeping, reusing


class _AroundExchanges(AbstractContextManager[None]):
    """While it is entered, which is once, exchanges run under a dispatch mode; nothing else does.

    Raises:
        ValueError: when it is entered again, after what was kept has been used up.
    """

    def __init__(self, mode: AbstractContextManager[Any]) -> None:
        self.mode, self.is_used = mode, False

    def __enter__(self) -> None:
        if self.is_used:
            raise ValueError(
                "got a second backward pass (retain_graph=True) through checkpointed blocks that "
                "keep what they receive from other ranks; expected one, which uses that up; set "
                "recompute_communication=True, switch gradient checkpointing off, or call the "
                "model again"
            )
        self.is_used = True
        self.outer = _mode.set(self.mode)

    def __exit__(self, *error: object) -> None:
        _mode.reset(self.outer)


class _GatherRows(torch.autograd.Function):
    """Forward gathers all rows on every rank; backward sums each row's gradients on its owner."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup, kind: str
    ) -> Tensor:
        ctx.sizes, ctx.group, ctx.kind, ctx.rows = sizes, group, kind, len(x)
        num_ranks = len(sizes)
        copies = x.repeat(num_ranks, *[1] * (x.ndim - 1))
        return all_to_all(copies, [len(x)] * num_ranks, sizes, group, kind=kind, backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        num_ranks = len(ctx.sizes)
        parts, _ = all_to_all(
            grad, ctx.sizes, [ctx.rows] * num_ranks, ctx.group, kind=ctx.kind, backward=True
        )
        return parts.unflatten(0, (num_ranks, ctx.rows)).sum(0), None, None, None


@uncompiled  # as an autograd function it would be traced, and what is sent with it
def gather_rows(
    x: Tensor, sizes: list[int], group: dist.ProcessGroup, *, kind: str = "gather"
) -> Tensor:
    """All ranks' rows ``[sum(sizes), ...]`` from the rows ``[sizes[rank], ...]`` of each.

    A loss computed on the result by every rank counts once per rank; averaged over the group that
    is the loss itself.
    """
    rows: Tensor = _GatherRows.apply(x, sizes, group, kind)
    return rows
