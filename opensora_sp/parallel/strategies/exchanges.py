"""Declarations of a strategy's collectives, from which the planner counts bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..batch_shape import BatchShape
from ..layout import plan_exchange


class BytesSent(NamedTuple):
    """Bytes that each rank sends to others."""

    forward: list[int]
    backward: list[int]


class Exchange(Protocol):
    """A collective of a forward pass and its adjoint of the backward pass."""

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent: ...

    def estimate(self, shape: BatchShape, ranks: int) -> float:
        """About the bytes that the busiest rank sends in one direction, without planning."""
        return float(max(self.sent(shape, ranks).forward))


@dataclass(frozen=True)
class AllToAll(Exchange):
    """``count`` exchanges of all entries from one layout to another; backward, in reverse."""

    count: int
    source: str
    target: str
    entry_bytes: int

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent:
        forward, backward = [], []
        for rank in range(ranks):
            plan = plan_exchange(shape.axes, self.source, self.target, ranks, rank, "cpu")
            received = sum(plan.recv_splits) - plan.recv_splits[rank]
            forward.append(self.count * self.entry_bytes * plan.sent_elsewhere(rank))
            backward.append(self.count * self.entry_bytes * received)

        return BytesSent(forward, backward)

    def estimate(self, shape: BatchShape, ranks: int) -> float:
        # A rank keeps its part of what it holds.
        held = max(shape.entries(self.source, ranks))
        return self.count * self.entry_bytes * held * (ranks - 1) / ranks


@dataclass(frozen=True)
class AllGather(Exchange):
    """``count`` gathers of all entries on every rank; backward, their gradients are sent back."""

    count: int
    layout: str
    entry_bytes: int

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent:
        held, each = shape.entries(self.layout, ranks), self.count * self.entry_bytes
        return BytesSent(
            forward=[entries * (ranks - 1) * each for entries in held],
            backward=[(sum(held) - entries) * each for entries in held],
        )
