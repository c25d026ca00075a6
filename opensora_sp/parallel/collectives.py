"""The collectives of sequence parallelism, each with its exact adjoint as backward.

All are ``all_to_all_single`` with split sizes that every rank knows beforehand. Ranks without rows
call them too. ``exchange`` is a registered operator, so that ``torch.compile`` takes it into its
graph as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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
    "bool reverse) -> Tensor"
)


def _exchange_now(
    tokens: Tensor,
    pack: Tensor,
    place: Tensor,
    send: list[int],
    recv: list[int],
    group: str,
    kind: str,
    reverse: bool,
) -> Tensor:
    """One copy to order tokens by receiver, one all-to-all, one copy to put what arrives in place.

    In reverse each step is undone, the last one first: what was read by index is written by index.
    """
    # Operators take no group objects.
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if reverse:
        send, recv, pack, place = recv, send, place, pack
    arrived, _ = all_to_all(
        tokens.index_select(0, pack), send, recv, process_group, kind=kind, backward=reverse
    )
    return torch.empty_like(arrived).index_copy_(0, place, arrived)


def _exchange_fake(
    tokens: Tensor,
    pack: Tensor,
    place: Tensor,
    send: list[int],
    recv: list[int],
    group: str,
    kind: str,
    reverse: bool,
) -> Tensor:
    return tokens.new_empty((pack if reverse else place).shape[0], *tokens.shape[1:])


_exchange = torch.library.custom_op(
    "opensora_sp::exchange", _exchange_now, mutates_args=(), schema=_SCHEMA
)
_exchange.register_fake(_exchange_fake)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, pack, place, ctx.send, ctx.recv, ctx.group, ctx.kind, ctx.reverse = inputs
    ctx.save_for_backward(pack, place)


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """An exchange permutes tokens over the ranks, so its adjoint is the exchange in reverse."""
    pack, place = ctx.saved_tensors
    back = _exchange(
        grad.contiguous(), pack, place, ctx.send, ctx.recv, ctx.group, ctx.kind, not ctx.reverse
    )
    return back, *[None] * 7


_exchange.register_autograd(_exchange_back, setup_context=_remember)


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
    splits = plan.send_splits, plan.recv_splits
    exchanged: Tensor = _exchange(
        tokens, plan.pack, plan.place, *splits, group.group_name, kind, reverse
    )
    return exchanged


def keep_exchanged() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of forward and of recomputation, for ``torch.utils.checkpoint``.

    The first keeps what exchanges return, so that the second sends nothing again.
    """
    keeping, using = create_selective_checkpoint_contexts([torch.ops.opensora_sp.exchange.default])
    return keeping, _Once(using)


class _Once:
    """A context of recomputation, which uses up what was kept and so can be entered once.

    Raises:
        ValueError: when it is entered again.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context, self.is_used = context, False

    def __enter__(self) -> None:
        if self.is_used:
            raise ValueError(
                "got a second backward pass (retain_graph=True) through checkpointed blocks that "
                "keep what they receive from other ranks; expected one, which uses that up; set "
                "recompute_communication=True, switch gradient checkpointing off, or call the "
                "model again"
            )
        self.is_used = True
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.context.__exit__(*error)


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
