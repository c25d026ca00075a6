"""Token layouts, and the exchanges between them: integer arithmetic, no processes.

A layout is written as the order of a batch's axes with one bar: the axes before the bar index
units, those after it lie inside a unit. Each rank holds a contiguous range of units, a "run",
balanced by number of entries: the end of a run is rounded down to the start of a unit. With equal
units, ranks differ by at most one unit; a rank may hold none.

    b t | s        spatial rows: one unit is a frame of a sample
    b s | t        temporal rows: one unit is a patch through all frames
    b w | p t      windows: one unit is a window of patches through all frames
    b t h | s      one head of one frame
    h | b t s      one head of everything

Windows are any ``Partition`` of a frame's patches; they may differ in size.

Turning one layout into another is a fixed exchange: from the sizes alone every rank computes which
entries it sends to whom (``send_splits``, in the order ``pack``) and where those it receives belong
(``recv_splits``, ``place``).

Legend: b samples, t frames, s patches of a frame, w windows of a frame, p patches of a window, h
heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

SPATIAL_ROWS = "b t | s"
TEMPORAL_ROWS = "b s | t"
WINDOW_ROWS = "b w | p t"
WINDOW_COLUMNS = "b w p | t"  # rows in the order of the windows, distributed one by one


class Partition(Protocol):
    """A division of a frame's S patches into windows. Plans are cached by its hash."""

    @property
    def order(self) -> tuple[int, ...]:
        """The patches, window by window."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the windows."""

    def __hash__(self) -> int: ...


def balanced_run(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The contiguous rows ``[start, stop)`` of one rank; numbers of rows differ by at most one."""
    return num_rows * rank // num_ranks, num_rows * (rank + 1) // num_ranks


def run_sizes(num_rows: int, num_ranks: int) -> list[int]:
    """Rows held by each rank."""
    runs = (balanced_run(num_rows, num_ranks, rank) for rank in range(num_ranks))
    return [stop - start for start, stop in runs]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's send and receive indices for converting a batch from one layout to another.

    It sends ``entries[pack]``, split by ``send_splits``. What it receives, ordered by sender and
    split by ``recv_splits``, is written to ``result[place]``.
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
    windows: Partition | None = None,
) -> ExchangePlan:
    """Plan one rank's part in an exchange of all entries from one layout to another.

    Every rank's run in the layout ``left`` may be sent in several chunks, one all-to-all each. They
    are cut between rows (entries that differ only in the last axis). The plan is that of one
    ``chunk``: ``pack`` indexes into the chunk, and ``place`` covers a part of the result. If a
    layout has axes w and p, they replace the axis s of ``sizes``, as ``windows`` divides it.
    Plans are cached.

    Raises:
        ValueError: if a layout does not name every axis once.
    """
    return _cached_plan(
        tuple(sizes.items()), left, entered, num_ranks, rank, device, chunk, num_chunks, windows
    )


def plan_delivery(made: Sequence[Tensor], wanted: Sequence[Tensor], rank: int) -> ExchangePlan:
    """Plan one rank's part in sending entries from the ranks that computed them to all that need
    them.

    Args:
        made: for each rank the indices of the entries it has, int64, in its own order.
        wanted: for each rank the entries it needs, bool ``[all entries]``; several ranks may need
            the same entry, or none.
        rank: the rank to plan for. ``pack`` indexes its own entries; ``place`` has the indices of
            those it receives.
    """
    sent = [of_receiver[made[rank]].nonzero().flatten() for of_receiver in wanted]
    arriving = [of_sender[wanted[rank][of_sender]] for of_sender in made]
    return ExchangePlan(
        pack=torch.cat(sent),
        place=torch.cat(arriving),
        send_splits=[len(entries) for entries in sent],
        recv_splits=[len(entries) for entries in arriving],
    )


def runs(
    sizes: Mapping[str, int], layout: str, num_ranks: int, windows: Partition | None = None
) -> tuple[tuple[int, int], ...]:
    """The entries ``[start, stop)`` that each rank holds in a layout."""
    return _cached_runs(tuple(sizes.items()), layout, num_ranks, windows)


def unit_runs(
    sizes: Mapping[str, int], layout: str, num_ranks: int, windows: Partition | None = None
) -> tuple[tuple[int, int], ...]:
    """The units ``[first, last)`` that each rank holds in a layout."""
    return _cached_runs(tuple(sizes.items()), layout, num_ranks, windows, units=True)


@lru_cache(maxsize=1024)
def _cached_runs(
    sizes: tuple[tuple[str, int], ...],
    layout: str,
    num_ranks: int,
    windows: Partition | None,
    units: bool = False,
) -> tuple[tuple[int, int], ...]:
    with torch.inference_mode(False), unset_fake_temporarily():
        described = _Layout(dict(sizes), layout, windows)
        entries = described.runs(num_ranks)
        if not units:
            return entries
        first = described.unit_numbers(torch.tensor([start for start, _ in entries])).tolist()
        return tuple(zip(first, [*first[1:], described.num_units], strict=True))


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
    windows: Partition | None,
) -> ExchangePlan:
    # A plan made in sampling serves training as well; one made under fake tensors is real.
    with torch.inference_mode(False), unset_fake_temporarily():
        left_layout = _Layout(dict(sizes), left, windows)
        entered_layout = _Layout(dict(sizes), entered, windows)
        left_runs, entered_runs = left_layout.runs(num_ranks), entered_layout.runs(num_ranks)

        # What this rank sends: the receiver of each entry of its chunk.
        chunks: list[tuple[int, int]] = []
        for run in left_runs:
            chunks += [left_layout.chunk(run, c, num_chunks) for c in range(num_chunks)]
        held = torch.arange(*chunks[rank * num_chunks + chunk])
        destination = left_layout.positions_in(entered_layout, held)
        receiver = _piece(destination, [stop for _, stop in entered_runs])

        # What it receives of this chunk: senders hold ascending runs and pack in their own order.
        wanted = torch.arange(*entered_runs[rank])
        source = entered_layout.positions_in(left_layout, wanted)
        piece = _piece(source, [stop for _, stop in chunks])
        mine = (piece % num_chunks == chunk).nonzero().flatten()
        order = torch.argsort(source[mine])

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
    """Map between flat positions and axis coordinates of a layout, and each rank's run of them.

    Windows differ in size, so strides depend on the window: for axes between w and p a stride is
    multiplied by the window's size, for axes before w by S.
    """

    def __init__(self, sizes: dict[str, int], text: str, windows: Partition | None) -> None:
        units, bar, within = text.partition("|")
        self.sizes, self.axes, self.units = sizes, [*units.split(), *within.split()], units.split()

        patches = "wp" if "w" in self.axes and windows is not None else "s"
        if not bar or sorted(self.axes) != sorted("".join(sizes).replace("s", patches)):
            raise ValueError(
                f"got layout {text!r} for the axes {sorted(sizes)}; expected each of them once and "
                "a bar after those that count units; write for example 'b t | s'"
            )

        self.total = math.prod(sizes.values())
        self.windows = windows if patches == "wp" else None
        if self.windows is not None:
            assert self.axes.index("w") < self.axes.index("p"), text
            self.window_sizes = torch.tensor(self.windows.sizes)
            self.window_stops = torch.tensor(list(accumulate(self.windows.sizes)))
            self.order = torch.tensor(self.windows.order)

    def runs(self, num_ranks: int) -> tuple[tuple[int, int], ...]:
        """Entries held by each rank: up to the last unit that ends within its share."""
        shares = torch.tensor([self.total * rank // num_ranks for rank in range(num_ranks)])
        coordinates = self._coordinates(shares)
        of_unit = {
            axis: index if axis in self.units else index * 0 for axis, index in coordinates.items()
        }
        starts = self._positions(of_unit).tolist()
        return tuple(zip(starts, [*starts[1:], self.total], strict=True))

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

    def chunk(self, run: tuple[int, int], chunk: int, num_chunks: int) -> tuple[int, int]:
        """One of several parts of a run, cut between rows."""
        row = self.sizes[self.axes[-1]]
        start, stop = balanced_run((run[1] - run[0]) // row, num_chunks, chunk)
        return run[0] + start * row, run[0] + stop * row

    def positions_in(self, other: _Layout, positions: Tensor) -> Tensor:
        """Where the entries at these positions lie in another layout of the same axes."""
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
        found = torch.zeros_like(coordinates["b"])
        for i, axis in enumerate(self.axes):
            index = self._window_start(coordinates["w"]) if axis == "w" else coordinates[axis]
            found = found + index * self._stride(i, coordinates)
        return found

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


UNIT_NAMES = {
    "b": "samples (B)",
    "b t": "spatial rows (B*T)",
    "b s": "temporal rows (B*S)",
    "b w": "windows (B*W)",
    "b w p": "temporal rows (B*S)",
    "b t h": "heads of frames (B*T*H)",
    "b w h": "heads of windows (B*W*H)",
    "b h": "heads of clips (B*H)",
    "h": "heads (H)",
}


def unit_name(layout: str) -> str:
    """What the units of a layout are, for users."""
    axes = layout.partition("|")[0].strip()
    return UNIT_NAMES.get(axes, f"units of {axes!r}")
