"""Who holds which tokens, and what each rank sends to each other: integer arithmetic, no processes.

A layout is written as the order of a batch's axes, with a bar: the axes before it count units, those after it lie
inside a unit. Units are dealt out in balanced runs, so ranks differ by at most one unit, and one may hold none.

    b t | s        spatial rows: one unit is a frame of a sample
    b s | t        temporal rows: one unit is a patch through all frames
    b t h | s      one head of one frame
    h | b t s      one head of everything

Turning one layout into another is a fixed exchange: from the sizes alone every rank computes which entries it sends to
whom (``send_splits``, in the order ``pack``) and where those it receives belong (``recv_splits``, ``place``).

Legend: b samples, t frames, s patches of a frame, h heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

SPATIAL_ROWS = "b t | s"
TEMPORAL_ROWS = "b s | t"


def balanced_run(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The rows ``[start, stop)`` of one rank: contiguous, and as many as any other rank's, give or take one."""
    return num_rows * rank // num_ranks, num_rows * (rank + 1) // num_ranks


def run_sizes(num_rows: int, num_ranks: int) -> list[int]:
    """Rows held by each rank."""
    return [stop - start for start, stop in (balanced_run(num_rows, num_ranks, r) for r in range(num_ranks))]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in bringing the entries of a batch into another layout.

    ``sent = entries[pack]``, cut by ``send_splits``; what arrives, sender by sender as ``recv_splits`` says, goes to
    ``result[place]``.
    """

    pack: Tensor
    place: Tensor
    send_splits: list[int]
    recv_splits: list[int]

    def sent_elsewhere(self, rank: int) -> int:
        """Entries that leave this rank."""
        return sum(self.send_splits) - self.send_splits[rank]


def plan_exchange(
    sizes: Mapping[str, int],
    left: str,
    entered: str,
    num_ranks: int,
    rank: int,
    device: torch.device | str,
    chunk: int = 0,
    num_chunks: int = 1,
) -> ExchangePlan:
    """Plan one rank's exchange of all entries of the axes ``sizes`` from the layout ``left`` to the one ``entered``.

    Every rank's run of units may be left in several chunks, an exchange each; the plan is then that of one ``chunk``:
    ``pack`` counts from the chunk's first entry and ``place`` fills a part of the result. Plans are cached.

    Raises:
        ValueError: if a layout does not name every axis once.
    """
    return _cached_plan(tuple(sizes.items()), left, entered, num_ranks, rank, device, chunk, num_chunks)


@lru_cache(maxsize=1024)
def _cached_plan(
    sizes: tuple[tuple[str, int], ...],
    left: str,
    entered: str,
    num_ranks: int,
    rank: int,
    device: torch.device | str,
    chunk: int,
    num_chunks: int,
) -> ExchangePlan:
    left_layout, entered_layout = _Layout(dict(sizes), left), _Layout(dict(sizes), entered)
    # a plan made while sampling serves training as well, one made while tracing with fake tensors is real
    with torch.inference_mode(False), unset_fake_temporarily():
        stops = [left_layout.run(num_ranks, r, c, num_chunks)[1] for r in range(num_ranks) for c in range(num_chunks)]
        held = torch.arange(*left_layout.run(num_ranks, rank, chunk, num_chunks))
        receiver = _piece(left_layout.positions_in(entered_layout, held), entered_layout.stops(num_ranks))
        wanted = torch.arange(*entered_layout.run(num_ranks, rank))
        source = entered_layout.positions_in(left_layout, wanted)
        piece = _piece(source, stops)
        mine = (piece % num_chunks == chunk).nonzero().flatten()
        order = torch.argsort(source[mine])  # senders hold ascending runs and pack in their own order
        return ExchangePlan(
            pack=torch.argsort(receiver, stable=True).to(device),
            place=mine[order].to(device),
            send_splits=torch.bincount(receiver, minlength=num_ranks).tolist(),
            recv_splits=torch.bincount(piece[mine] // num_chunks, minlength=num_ranks).tolist(),
        )


def _piece(positions: Tensor, stops: list[int]) -> Tensor:
    """Which of the consecutive pieces ending at ``stops`` each position lies in."""
    return torch.bucketize(positions, torch.tensor(stops), right=True)


class _Layout:
    """Positions of entries in one order of the axes, and the runs of them that ranks hold."""

    def __init__(self, sizes: dict[str, int], text: str) -> None:
        units, bar, within = text.partition("|")
        self.sizes, self.axes = sizes, [*units.split(), *within.split()]
        if not bar or sorted(self.axes) != sorted(sizes):
            raise ValueError(
                f"got layout {text!r} for the axes {sorted(sizes)}; expected each of them once and a bar after those "
                "that count units; write for example 'b t | s'"
            )
        self.num_units = math.prod(sizes[axis] for axis in units.split())
        self.unit_size = math.prod(sizes[axis] for axis in within.split())

    def run(self, num_ranks: int, rank: int, chunk: int = 0, num_chunks: int = 1) -> tuple[int, int]:
        """The entries ``[start, stop)`` that a rank holds, or one chunk of them, cut between units."""
        first, last = balanced_run(self.num_units, num_ranks, rank)
        start, stop = balanced_run(last - first, num_chunks, chunk)
        return (first + start) * self.unit_size, (first + stop) * self.unit_size

    def stops(self, num_ranks: int) -> list[int]:
        return [self.run(num_ranks, rank)[1] for rank in range(num_ranks)]

    def positions_in(self, other: _Layout, positions: Tensor) -> Tensor:
        """Where the entries at these positions lie in another layout of the same axes."""
        coordinates = {}
        for axis in reversed(self.axes):
            coordinates[axis] = positions % self.sizes[axis]
            positions = positions // self.sizes[axis]
        found = torch.zeros_like(positions)
        for axis in other.axes:
            found = found * other.sizes[axis] + coordinates[axis]
        return found
