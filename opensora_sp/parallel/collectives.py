"""The two exchanges of sequence parallelism, each with its exact adjoint as backward.

Both are one ``all_to_all_single`` with split sizes that every rank knows beforehand. Ranks without rows call them too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import SwitchPlan
from .ledger import record


def _all_to_all(x: Tensor, send: list[int], recv: list[int], group: dist.ProcessGroup, kind: str, bwd: bool) -> Tensor:
    """Entries ``[sum(send), ...]`` cut by receiver -> ``[sum(recv), ...]`` in order of the sender."""
    out = x.new_empty(sum(recv), *x.shape[1:])
    rank = dist.get_rank(group)
    record(kind, backward=bwd, elements=(sum(send) - send[rank]) * x[:1].numel())
    dist.all_to_all_single(out, x.contiguous(), output_split_sizes=recv, input_split_sizes=send, group=group)
    return out


def _exchange(tokens: Tensor, plan: SwitchPlan, group: dist.ProcessGroup, bwd: bool) -> Tensor:
    packed = tokens.index_select(0, plan.pack)
    return _all_to_all(packed, plan.send_splits, plan.recv_splits, group, "switch", bwd).index_select(0, plan.unpack)


class _SwitchTokens(torch.autograd.Function):
    """Forward permutes tokens over the ranks; backward applies the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, there: SwitchPlan, back: SwitchPlan, group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        return _exchange(tokens, there, group, bwd=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.back, ctx.group, bwd=True), None, None, None


class _GatherRows(torch.autograd.Function):
    """Forward gives every rank all rows; backward gives every row's holder the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group, ctx.rows = sizes, group, len(x)
        num_ranks = len(sizes)
        copies = x.repeat(num_ranks, *[1] * (x.ndim - 1))
        return _all_to_all(copies, [len(x)] * num_ranks, sizes, group, "gather", bwd=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        num_ranks = len(ctx.sizes)
        parts = _all_to_all(grad, ctx.sizes, [ctx.rows] * num_ranks, ctx.group, "gather", bwd=True)
        return parts.unflatten(0, (num_ranks, ctx.rows)).sum(0), None, None


def switch_tokens(tokens: Tensor, there: SwitchPlan, back: SwitchPlan, group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens ``[n, C]`` held in one layout for those held in the other, ``[n', C]``.

    ``there`` and ``back`` are this rank's plans for the switch and for its reverse.
    """
    return _SwitchTokens.apply(tokens, there, back, group)


def gather_rows(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows ``[sum(sizes), ...]`` from the rows ``[sizes[rank], ...]`` of each.

    A loss computed on the result by every rank counts once per rank; averaged over the group that is the loss itself.
    """
    return _GatherRows.apply(x, sizes, group)
