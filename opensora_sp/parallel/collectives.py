"""The collectives of sequence parallelism, each with its exact adjoint as backward.

All are ``all_to_all_single`` with split sizes that every rank knows beforehand. Ranks without rows
call them too. ``exchange`` is a registered operator, so that ``torch.compile`` takes it into its
graph as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.common.graphs import Context, Once, Pair, once_differentiable, uncompiled

from .communication import communicating, record
from .layout import ExchangePlan
from .mesh import ImaginedGroup


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
    # A rank's own part is copied, not sent.
    to_others = sum(send) - send[group.rank()]
    elements = to_others * x[:1].numel()
    record(kind, backward=backward, elements=elements, element_size=x.element_size())
    # Counted before this return, so that the planner reads the bytes of a model that it traces
    # alone.
    if isinstance(group, ImaginedGroup):
        return out, cast(dist.Work, group)

    # Backends refuse tensors with gaps.
    x = x.contiguous()
    if async_op:
        return out, dist.all_to_all_single(out, x, recv, send, group=group, async_op=True)
    with communicating(kind, x.device, backward=backward):
        dist.all_to_all_single(out, x, recv, send, group=group)
    return out, None


_SCHEMA = (
    "(Tensor tokens, Tensor pack, Tensor unpack, int[] send, int[] recv, str group, str kind, "
    "bool backward) -> Tensor"
)


def _exchange_now(
    tokens: Tensor,
    pack: Tensor,
    unpack: Tensor,
    send: list[int],
    recv: list[int],
    group: str,
    kind: str,
    backward: bool,
) -> Tensor:
    """One copy to order tokens by receiver, one all-to-all, one copy to put what arrives in
    its order; in recomputation the result that ``Received`` has kept.
    """

    def send_and_receive() -> Tensor:
        # Operators take no group objects.
        name = dist.distributed_c10d.GroupName(group)
        process_group = dist.distributed_c10d._resolve_process_group(name)
        # Splits of an all-to-all are contiguous, so tokens are ordered by receiver first.
        packed = tokens.index_select(0, pack)
        received, _ = all_to_all(packed, send, recv, process_group, kind=kind, backward=backward)
        return torch.empty_like(received).index_copy_(0, unpack, received)

    return _entered[-1].result_of(send_and_receive) if _entered else send_and_receive()


_exchange = torch.library.custom_op(
    "opensora_sp::exchange", _exchange_now, mutates_args=(), schema=_SCHEMA
)


def _exchange_fake(tokens: Tensor, pack: Tensor, unpack: Tensor, *_: Any) -> Tensor:
    def allocate() -> Tensor:
        return tokens.new_empty(len(unpack), *tokens.shape[1:])

    # Meta tensors, as of the planner, are kept; fake ones belong to a compiler.
    is_kept = _entered and type(tokens) is Tensor
    return _entered[-1].result_of(allocate) if is_kept else allocate()


_exchange.register_fake(_exchange_fake)


def _save_plan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, pack, unpack, *ctx.others = inputs
    ctx.save_for_backward(pack, unpack)


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """An exchange permutes tokens over the ranks, so its adjoint is the exchange in reverse."""
    pack, unpack = ctx.saved_tensors
    send, recv, group, kind, backward = ctx.others
    # Recorded as backward, unless this is the backward of a backward.
    back = _exchange(grad.contiguous(), unpack, pack, recv, send, group, kind, not backward)
    return back, *[None] * 7


_exchange.register_autograd(_exchange_back, setup_context=_save_plan)


class Received:
    """Results of exchanges in forward, kept for the recomputation of gradient checkpointing.

    ``keeping()`` and ``reusing()`` are contexts of the two. Under the second, exchanges return what
    was kept, in the same order, and send nothing.
    """

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self._reuses = False

    def keeping(self) -> Context:
        return self._enter(reuses=False)

    def reusing(self) -> Context:
        return self._enter(reuses=True)

    @contextmanager
    def _enter(self, *, reuses: bool) -> Iterator[None]:
        self._reuses = reuses
        _entered.append(self)
        try:
            yield
        finally:
            _entered.pop()

    def result_of(self, exchange: Callable[[], Tensor]) -> Tensor:
        """The result of an exchange in the context that is entered."""
        if self._reuses:
            return self._results.popleft()
        result = exchange()
        # Without the graph, which autograd is going to attach.
        self._results.append(result.detach())
        return result


# The innermost context is the last.
_entered: list[Received] = []


def exchange(
    tokens: Tensor, plan: ExchangePlan, group: dist.ProcessGroup, *, kind: str = "switch"
) -> Tensor:
    """Exchange entries ``[n, C]`` held in one layout for those held in the other, ``[n', C]``, by
    this rank's plan.

    ``kind`` is what a ``CommLedger`` files it under.
    """
    indices = plan.pack, plan.unpack, plan.send_splits, plan.recv_splits
    exchanged: Tensor = _exchange(tokens, *indices, group.group_name, kind, False)
    return exchanged


def keep_exchanged() -> Pair:
    """``Received`` for ``torch.utils.checkpoint``; its second context is entered once."""
    received = Received()
    return received.keeping(), Once(received.reusing())


class _GatherRows(torch.autograd.Function):
    """Forward gathers all rows on every rank; backward sums each row's gradients on its owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], send: Callable[..., Any]) -> Tensor:
        ctx.send, ctx.splits = send, ([len(x)] * len(sizes), sizes)
        # An all-gather needs parts of one size, and its adjoint a reduce-scatter. An all-to-all
        # with the same rows for each receiver takes parts of any size, also empty ones.
        copies = x.repeat(len(sizes), *[1] * (x.ndim - 1))
        rows: Tensor = send(copies, *ctx.splits, backward=False)[0]
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        local_sizes, sizes = ctx.splits
        parts, _ = ctx.send(grad, sizes, local_sizes, backward=True)
        # No division by the number of ranks: the mean over the ranks, which ZeRO or DDP takes of
        # all gradients, already has it.
        return parts.unflatten(0, (len(local_sizes), local_sizes[0])).sum(0), None, None


# As an autograd function it would be traced, and its exchange as well.
@uncompiled
def gather_rows(
    x: Tensor, sizes: list[int], group: dist.ProcessGroup, *, kind: str = "gather"
) -> Tensor:
    """All ranks' rows ``[sum(sizes), ...]`` from the rows ``[sizes[rank], ...]`` of each.

    A loss computed on the result by every rank counts once per rank; averaged over the group that
    is the loss itself.
    """
    rows: Tensor = _GatherRows.apply(x, sizes, partial(all_to_all, group=group, kind=kind))
    return rows
