"""Switches that travel while the model computes.

A block ends with work on single tokens. Done in chunks of rows, each chunk is sent off while the next is computed
(``launch``), and the switch waits for all of them (``land``). Backward mirrors it: landing sends all gradients off,
launching waits for those of its chunk. Under checkpointing the launch belongs to what is recomputed and saves an
(empty) tensor; asking for it back starts the recomputation, so gradients travel meanwhile.

What is under way stays with the ``Flight``; autograd sees only empty tickets that tie launches to their landing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_to_all
from .debug.comm_timing import communicating
from .layout import ExchangePlan
from .typed import once_differentiable

KIND = "switch"


class Flight:
    """One switch under way: a chunk of this rank's tokens at a time."""

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
        self._under_way: dict[
            int, tuple[Tensor, Tensor, dist.Work]
        ] = {}  # what is sent, what arrives
        self._tickets: list[Tensor] = []

    def launch(self, chunks: Iterable[Tensor], num_chunks: int) -> Flight:
        """Send chunks ``[rows, L, C]`` off as they are computed. In recomputation nothing is sent again."""
        self._plans = [self._plan(chunk, num_chunks) for chunk in range(num_chunks)]
        recomputes = bool(self._sent)  # whose graph is checkpointing's, not ours to hold
        tickets = [_Launch.apply(x.flatten(0, 1), self, chunk) for chunk, x in enumerate(chunks)]
        self._tickets = [] if recomputes else tickets
        return self

    def land(self) -> Tensor:
        """Wait for all chunks: the tokens ``[n, C]`` of the layout entered."""
        tickets, self._tickets = self._tickets, []
        landed: Tensor = _Land.apply(self, *tickets)
        return landed

    def send(self, chunk: int, tokens: Tensor) -> None:
        if chunk not in self._sent:
            self._sent.add(chunk)
            plan = self._plans[chunk]
            self._start(
                chunk,
                tokens.index_select(0, plan.pack),
                plan.send_splits,
                plan.recv_splits,
                backward=False,
            )

    def receive(self) -> Tensor:
        parts = [self._wait(chunk, backward=False) for chunk in range(len(self._plans))]
        landed = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
        for plan, part in zip(self._plans, parts, strict=True):
            landed.index_copy_(0, plan.place, part)
        return landed

    def send_back(self, grad: Tensor) -> None:
        for chunk, plan in reversed(
            list(enumerate(self._plans))
        ):  # the last chunk's gradient is used first
            self._start(
                chunk,
                grad.index_select(0, plan.place),
                plan.recv_splits,
                plan.send_splits,
                backward=True,
            )
            if not self._overlap_backward:
                _, arriving, work = self._under_way[chunk]
                _wait_for(work, arriving, backward=True)

    def receive_back(self, chunk: int) -> Tensor:
        part = self._wait(chunk, backward=True)
        return torch.empty_like(part).index_copy_(0, self._plans[chunk].pack, part)

    def _start(
        self, chunk: int, packed: Tensor, send: list[int], recv: list[int], *, backward: bool
    ) -> None:
        arriving, work = all_to_all(
            packed, send, recv, self._group, kind=KIND, backward=backward, async_op=True
        )
        assert work is not None
        self._under_way[chunk] = packed, arriving, work

    def _wait(self, chunk: int, *, backward: bool) -> Tensor:
        _, arriving, work = self._under_way.pop(chunk)
        _wait_for(work, arriving, backward=backward)
        return arriving


def _wait_for(work: dist.Work, arriving: Tensor, *, backward: bool) -> None:
    with communicating(KIND, arriving.device, backward=backward):
        work.wait()


class _Launch(torch.autograd.Function):
    """Forward sends a chunk off and returns a ticket; backward waits for the chunk's gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, flight: Flight, chunk: int) -> Tensor:
        ctx.flight, ctx.chunk = flight, chunk
        ctx.save_for_backward(tokens.new_empty(0))
        flight.send(chunk, tokens)
        return tokens.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None, None]:
        _ = (
            ctx.saved_tensors
        )  # under checkpointing this recomputes the block, while its gradient travels
        return ctx.flight.receive_back(ctx.chunk), None, None


class _Land(torch.autograd.Function):
    """Forward waits for all chunks; backward sends their gradients off and returns tickets."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tickets: Tensor) -> Tensor:
        ctx.flight, ctx.num_chunks = flight, len(tickets)
        return flight.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.flight.send_back(grad)
        return None, *(grad.new_empty(0) for _ in range(ctx.num_chunks))
