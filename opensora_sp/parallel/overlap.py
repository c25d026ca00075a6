"""Switches in flight while the model computes.

A block ends with work on single tokens. Done in chunks of rows, each chunk is sent while the next
one is computed (``start``), and the switch completes when all have arrived (``wait``). Backward
mirrors it: completion sends all gradients, and the start of each chunk waits for its own. Under
checkpointing the start belongs to the recomputed part and saves an (empty) tensor; unpacking it
begins the recomputation, so that gradients are in flight meanwhile.

Tensors in flight belong to the ``InFlightSwitch``; autograd sees only empty tickets that tie starts
to their wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.common.graphs import once_differentiable

from .collectives import all_to_all
from .communication import communicating
from .layout import ExchangePlan

KIND = "switch"


@dataclass(frozen=True)
class _Transfer:
    """One asynchronous all-to-all; ``packed`` has to live until it completes."""

    packed: Tensor
    arriving: Tensor
    work: dist.Work

    def wait(self, *, backward: bool) -> Tensor:
        with communicating(KIND, self.arriving.device, backward=backward):
            self.work.wait()
        return self.arriving


class InFlightSwitch:
    """One switch, a chunk of this rank's tokens at a time.

    Args:
        plan: the exchange of ``chunk`` of ``num_chunks``.
        overlap_backward: start the gradients' exchange and recompute before waiting for it.
    """

    def __init__(
        self,
        plan: Callable[[int, int], ExchangePlan],
        group: dist.ProcessGroup,
        *,
        overlap_backward: bool,
    ) -> None:
        self._plan, self._group, self._overlap_backward = plan, group, overlap_backward
        self._plans: list[ExchangePlan] = []
        self._sent: set[int] = set()
        self._transfers: dict[int, _Transfer] = {}  # by chunk
        self._tickets: list[Tensor] = []

    def start(self, chunks: Iterable[Tensor], num_chunks: int) -> InFlightSwitch:
        """Send chunks ``[rows, L, C]`` as they are computed, not again in recomputation."""
        recomputes = bool(self._plans)
        self._plans = [self._plan(chunk, num_chunks) for chunk in range(num_chunks)]
        tickets = [_Start.apply(x.flatten(0, 1), self, chunk) for chunk, x in enumerate(chunks)]

        # The graph of a recomputation is held by checkpointing.
        self._tickets = [] if recomputes else tickets
        return self

    def wait(self) -> Tensor:
        """Complete all chunks: the tokens ``[n, C]`` of the layout entered."""
        tickets, self._tickets = self._tickets, []
        tokens: Tensor = _Wait.apply(self, *tickets)
        return tokens

    def send(self, chunk: int, tokens: Tensor) -> None:
        # Recomputation starts each chunk once more, and sends nothing.
        if chunk not in self._sent:
            self._sent.add(chunk)
            plan = self._plans[chunk]
            packed = tokens.index_select(0, plan.pack)
            self._start(chunk, packed, plan.send_splits, plan.recv_splits, backward=False)

    def receive(self) -> Tensor:
        parts = [
            self._transfers.pop(chunk).wait(backward=False) for chunk in range(len(self._plans))
        ]
        # A chunk's tokens are not neighbours in the layout entered, so parts cannot be
        # concatenated.
        tokens = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
        for plan, part in zip(self._plans, parts, strict=True):
            tokens.index_copy_(0, plan.unpack, part)
        return tokens

    def send_gradient(self, grad: Tensor) -> None:
        # The last chunk's gradient is used first.
        for chunk, plan in reversed(list(enumerate(self._plans))):
            packed = grad.index_select(0, plan.unpack)
            self._start(chunk, packed, plan.recv_splits, plan.send_splits, backward=True)
            # Without overlap, gradients have arrived before anything is recomputed.
            if not self._overlap_backward:
                self._transfers[chunk].wait(backward=True)

    def receive_gradient(self, chunk: int) -> Tensor:
        part = self._transfers.pop(chunk).wait(backward=True)
        return torch.empty_like(part).index_copy_(0, self._plans[chunk].pack, part)

    def _start(
        self, chunk: int, packed: Tensor, send: list[int], recv: list[int], *, backward: bool
    ) -> None:
        arriving, work = all_to_all(
            packed, send, recv, self._group, kind=KIND, backward=backward, async_op=True
        )
        assert work is not None
        self._transfers[chunk] = _Transfer(packed, arriving, work)


class _Start(torch.autograd.Function):
    """Forward sends a chunk and returns a ticket; backward waits for the chunk's gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, switch: InFlightSwitch, chunk: int) -> Tensor:
        ctx.switch, ctx.chunk = switch, chunk
        # Unpacking a saved tensor is what makes checkpointing recompute, so one is saved though
        # backward needs none.
        ctx.save_for_backward(tokens.new_empty(0))
        switch.send(chunk, tokens)
        return tokens.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None, None]:
        # Under checkpointing this recomputes the block, while its gradient is in flight.
        _ = ctx.saved_tensors
        return ctx.switch.receive_gradient(ctx.chunk), None, None


class _Wait(torch.autograd.Function):
    """Forward completes all chunks; backward sends their gradients and returns tickets."""

    @staticmethod
    def forward(ctx: Any, switch: InFlightSwitch, *tickets: Tensor) -> Tensor:
        ctx.switch, ctx.num_chunks = switch, len(tickets)
        return switch.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.switch.send_gradient(grad)
        return None, *(grad.new_empty(0) for _ in range(ctx.num_chunks))
