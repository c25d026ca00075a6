"""Token layouts, and the exchanges between them: integer arithmetic, no processes.

A layout is written as the order of a batch's axes with one bar: the axes before the bar index
units, those after it lie inside a unit. Each rank holds a contiguous range of units, balanced by
number of entries: the end of a range is rounded down to the start of a unit. With equal units,
ranks differ by at most one unit; a rank may hold none.

    b t | s        spatial rows: one unit is a frame of a sample
    b s | t        temporal rows: one unit is a patch through all frames
    b w | p t      windows: one unit is a window of patches through all frames
    b t h | s      one head of one frame
    h | b t s      one head of everything

Windows are any ``Partition`` of a frame's patches; they may differ in size.

Turning one layout into another is a fixed exchange: from the sizes alone every rank computes which
entries it sends to whom (``send_splits``, in the order ``pack``) and where those it receives belong
(``recv_splits``, ``unpack``).

Legend: b samples, t frames, s patches of a frame, w windows of a frame, p patches of a window, h
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from opensora_sp.common.tensors import to_device

Function = TypeVar("Function", bound=Callable[..., Any])

Range: TypeAlias = tuple[int, int]  # [start, stop)
Ranges: TypeAlias = tuple[Range, ...]

SPATIAL_ROWS = "b t | s"
TEMPORAL_ROWS = "b s | t"
WINDOW_ROWS = "b w | p t"
# Rows in the order of the windows, distributed one by one.
WINDOW_COLUMNS = "b w p | t"


class Partition(Protocol):
    """A division of a frame's S patches into windows. Plans are cached by its hash."""

    # The patches, window by window.
    order: tuple[int, ...]
    sizes: tuple[int, ...]  # of the windows

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class BatchAxes:
    """Sizes of a batch's axes.

    ``h`` counts where a layout has it. ``windows`` divide the patches where a layout has w and p.
    """

    b: int
    t: int
    s: int
    h: int = 1
    windows: Partition | None = None


def balanced_range(num_rows: int, num_ranks: int, rank: int) -> Range:
    """The contiguous rows ``[start, stop)`` of one rank; numbers of rows differ by at most one."""
    return num_rows * rank // num_ranks, num_rows * (rank + 1) // num_ranks


def balanced_sizes(num_rows: int, num_ranks: int) -> list[int]:
    """Rows held by each rank."""
    ranges = (balanced_range(num_rows, num_ranks, rank) for rank in range(num_ranks))
    return [stop - start for start, stop in ranges]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's send and receive indices for converting a batch from one layout to another.

    It sends ``entries[pack]``, split by ``send_splits``. What it receives, ordered by sender and
    split by ``recv_splits``, is written to ``result[unpack]``.
    """

    pack: Tensor
    unpack: Tensor
    send_splits: list[int]
    recv_splits: list[int]

    def sent_elsewhere(self, rank: int) -> int:
        """Entries that leave this rank."""
        return sum(self.send_splits) - self.send_splits[rank]


def _cached(function: Function) -> Function:
    """Keep results: of sampling for training as well, and real ones under fake tensors."""

    @lru_cache(maxsize=1024)
    @wraps(function)
    def cached(*args: Any, **kwargs: Any) -> Any:
        # A plan of a sampling step would otherwise be an inference tensor, which autograd cannot
        # save when training reads it from the cache.
        with torch.inference_mode(False), unset_fake_temporarily():
            return function(*args, **kwargs)

    return cast(Function, cached)


@_cached
def plan_exchange(
    axes: BatchAxes,
    source: str,
    target: str,
    num_ranks: int,
    rank: int,
    device: torch.device | str,
    chunk: int = 0,
    num_chunks: int = 1,
) -> ExchangePlan:
    """Plan one rank's part in an exchange of all entries from one layout to another.

    Every rank's range in the layout ``source`` may be sent in several chunks, one all-to-all each.
    They are cut between rows (entries that differ only in the last axis). The plan is for one
    ``chunk``: ``pack`` indexes into it, and ``unpack`` covers a part of the result. Plans are
    cached.

    Raises:
        ValueError: if a layout does not name every axis once.
    """
    source_layout, target_layout = _Layout(axes, source), _Layout(axes, target)
    source_ranges, target_ranges = source_layout.ranges(num_ranks), target_layout.ranges(num_ranks)

    # What this rank sends: the receiver of each entry of its chunk.
    chunks: list[Range] = []
    for source_range in source_ranges:
        chunks += [source_layout.chunk(source_range, c, num_chunks) for c in range(num_chunks)]
    entries = torch.arange(*chunks[rank * num_chunks + chunk])
    receiver = _piece(source_layout.positions_in(target_layout, entries), target_ranges)

    # What it receives of this chunk: senders hold ascending ranges and pack in their own order.
    entries = torch.arange(*target_ranges[rank])
    sent_from = target_layout.positions_in(source_layout, entries)
    piece = _piece(sent_from, chunks)
    mine = (piece % num_chunks == chunk).nonzero().flatten()
    order = torch.argsort(sent_from[mine])

    return ExchangePlan(
        # Stable: the receiver sorts what arrives by the sender's order, without being sent indices.
        pack=to_device(torch.argsort(receiver, stable=True), torch.device(device)),
        unpack=to_device(mine[order], torch.device(device)),
        send_splits=torch.bincount(receiver, minlength=num_ranks).tolist(),
        recv_splits=torch.bincount(piece[mine] // num_chunks, minlength=num_ranks).tolist(),
    )


def _piece(positions: Tensor, pieces: Sequence[Range]) -> Tensor:
    """The number of the consecutive ``[start, stop)`` that each position lies in."""
    # Stops rather than starts: empty ranges share theirs, and right=True passes over them.
    stops = torch.tensor([stop for _, stop in pieces])
    return torch.bucketize(positions, stops, right=True)


def plan_delivery(made: Sequence[Tensor], wanted: Sequence[Tensor], rank: int) -> ExchangePlan:
    """Plan one rank's part in sending entries from the ranks that computed them to all that need
    them.

    Args:
        made: for each rank the indices of the entries it has, int64, in its own order.
        wanted: for each rank the entries it needs, bool ``[all entries]``; several ranks may need
            the same entry, or none.
        rank: the rank to plan for. ``pack`` indexes its own entries; ``unpack`` has the indices of
            those it receives.
    """
    sent = [receiver_mask[made[rank]].nonzero().flatten() for receiver_mask in wanted]
    arriving = [entries[wanted[rank][entries]] for entries in made]
    return ExchangePlan(
        pack=torch.cat(sent),
        unpack=torch.cat(arriving),
        send_splits=[len(entries) for entries in sent],
        recv_splits=[len(entries) for entries in arriving],
    )


@_cached
def plan_heads(
    num_heads: int, counts: tuple[int, ...], rank: int, device: torch.device | str
) -> ExchangePlan:
    """Plan one rank's part in an exchange of all heads of its tokens for all tokens of its heads.

    Entries are ``[head, token]`` before and after. Afterwards each rank has a balanced range of the
    heads, of which there may be none, with the tokens in the order of the ranks.

    Args:
        num_heads: heads of all samples.
        counts: the tokens of each rank.
    """
    heads, total = balanced_sizes(num_heads, len(counts)), sum(counts)
    starts = [0, *accumulate(counts)]
    everything = torch.arange(heads[rank] * total).view(heads[rank], total)
    unpack = [everything[:, start:stop].flatten() for start, stop in pairwise(starts)]
    return ExchangePlan(
        pack=to_device(torch.arange(num_heads * counts[rank]), torch.device(device)),
        unpack=to_device(torch.cat(unpack), torch.device(device)),
        send_splits=[count * counts[rank] for count in heads],
        recv_splits=[heads[rank] * count for count in counts],
    )


@_cached
def rank_ranges(axes: BatchAxes, layout: str, num_ranks: int) -> Ranges:
    """The entries ``[start, stop)`` that each rank holds in a layout."""
    return _Layout(axes, layout).ranges(num_ranks)


@_cached
def unit_ranges(axes: BatchAxes, layout: str, num_ranks: int) -> Ranges:
    """The units ``[first, last)`` that each rank holds in a layout."""
    units = _Layout(axes, layout)
    # A rank without entries starts where the next one does, and so gets no unit.
    starts = torch.tensor([start for start, _ in units.ranges(num_ranks)])
    return _consecutive(units.unit_numbers(starts), units.num_units)


def _consecutive(starts: Tensor, end: int) -> Ranges:
    """Ranges that begin at ``starts``, each up to the next one."""
    edges = [*starts.tolist(), end]
    return tuple(pairwise(edges))


class _Layout:
    """Map between flat positions and axis coordinates of a layout, and each rank's range of them.

    Windows differ in size, so strides depend on the window: for axes between w and p a stride is
    multiplied by the window's size, for axes before w by S.
    """

    def __init__(self, batch: BatchAxes, text: str) -> None:
        units, bar, within = text.partition("|")
        self.units = units.split()
        self.axes = [*self.units, *within.split()]

        names = "btsh" if "h" in self.axes else "bts"
        self.sizes: dict[str, int] = {name: getattr(batch, name) for name in names}
        self.total = math.prod(self.sizes.values())
        self.windows = batch.windows if "w" in self.axes else None

        patches = "s" if self.windows is None else "wp"
        if not bar or sorted(self.axes) != sorted(names.replace("s", patches)):
            raise ValueError(
                f"got layout {text!r} for the axes {sorted(names)}; expected each of them once and "
                "a bar after those that count units; write for example 'b t | s'"
            )

        if self.windows is not None:
            assert self.axes.index("w") < self.axes.index("p"), text
            self.window_sizes = torch.tensor(self.windows.sizes)
            self.window_stops = torch.tensor(list(accumulate(self.windows.sizes)))
            self.order = torch.tensor(self.windows.order)

    def ranges(self, num_ranks: int) -> Ranges:
        """Entries held by each rank: up to the last unit that ends within its share."""
        # Balanced by entries, not units: windows differ in size.
        shares = torch.tensor([self.total * rank // num_ranks for rank in range(num_ranks)])
        coordinates = self._coordinates(shares)
        unit_starts = {
            axis: index if axis in self.units else index * 0 for axis, index in coordinates.items()
        }
        return _consecutive(self._positions(unit_starts), self.total)

    @property
    def num_units(self) -> int:
        last = self.unit_numbers(torch.tensor([self.total - 1]))
        return int(last) + 1

    def unit_numbers(self, positions: Tensor) -> Tensor:
        """The unit of each position; the end of all entries is in the one after the last."""
        coordinates, number = self._coordinates(positions), torch.zeros_like(positions)
        for axis in self.units:
            if axis == "w" and "p" in self.units:
                number = number * self.sizes["s"] + self._window_start(coordinates["w"])
            elif axis == "p":
                number = number + coordinates["p"]
            else:
                count = len(self.window_sizes) if axis == "w" else self.sizes[axis]
                number = number * count + coordinates[axis]
        return number

    def chunk(self, entries: Range, chunk: int, num_chunks: int) -> Range:
        """One of several parts of a range, cut between rows."""
        first, end = entries
        row = self.sizes[self.axes[-1]]
        start, stop = balanced_range((end - first) // row, num_chunks, chunk)
        return first + start * row, first + stop * row

    def positions_in(self, other: _Layout, positions: Tensor) -> Tensor:
        """The positions of these entries in another layout of the same axes."""
        coordinates = self._coordinates(positions)
        if self.windows is not None:
            place = self._window_start(coordinates["w"]) + coordinates.pop("p")
            del coordinates["w"]
            coordinates["s"] = self.order[place]
        if other.windows is not None:
            place = torch.argsort(other.order)[coordinates.pop("s")]
            window = torch.bucketize(place, other.window_stops, right=True)
            coordinates |= {"w": window, "p": place - other._window_start(window)}
        return other._positions(coordinates)

    def _positions(self, coordinates: dict[str, Tensor]) -> Tensor:
        positions = torch.zeros_like(coordinates["b"])
        for i, axis in enumerate(self.axes):
            index = self._window_start(coordinates["w"]) if axis == "w" else coordinates[axis]
            positions = positions + index * self._stride(i, coordinates)
        return positions

    def _coordinates(self, positions: Tensor) -> dict[str, Tensor]:
        coordinates: dict[str, Tensor] = {}
        for i, axis in enumerate(self.axes):
            stride = self._stride(i, coordinates)
            index = positions // stride
            if axis == "w":
                coordinates["w"] = torch.bucketize(index, self.window_stops, right=True)
                index = self._window_start(coordinates["w"])
            else:
                coordinates[axis] = index
            positions = positions - index * stride
        return coordinates

    def _stride(self, i: int, coordinates: dict[str, Tensor]) -> int | Tensor:
        """Entries passed by a step along axis ``i``; along w, a step is a patch."""
        later = self.axes[i + 1 :]
        stride = math.prod(self.sizes[axis] for axis in later if axis not in "wp")
        if "w" in later:
            return stride * self.sizes["s"]
        if "p" in later and self.axes[i] != "w":
            return stride * self.window_sizes[coordinates["w"]]
        return stride

    def _window_start(self, window: Tensor) -> Tensor:
        return self.window_stops[window] - self.window_sizes[window]
