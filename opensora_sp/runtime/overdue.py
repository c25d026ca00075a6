"""Which rank a collective waits for, judged by heartbeats written after the collective was overdue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .collective_recorder import Collective, CollectiveRecorder

Heartbeats = dict[int, dict[str, Any]]  # by rank


@dataclass(frozen=True)
class _Found:
    """An overdue collective as it was found, and the number of each peer's heartbeat then."""

    returned: bool
    numbers: dict[int, int]

    def is_older_than(self, beats: Heartbeats) -> bool:
        """Whether each peer has written all of its heartbeat since; one that has left writes none.

        The first heartbeat after the one found may have been under way, so it takes the second.
        """
        return all(
            beat["left"] or beat["number"] >= self.numbers[rank] + 2 for rank, beat in beats.items()
        )


class OverdueCollectives:
    """Collectives that were begun here long ago, each until all ranks are known to have joined it.

    Args:
        seconds: from one heartbeat of this rank to the next.
        beats_of: reads the newest heartbeats of some ranks.
    """

    def __init__(
        self,
        recorder: CollectiveRecorder,
        *,
        rank: int,
        timeout: float,
        seconds: float,
        beats_of: Callable[[list[int]], Heartbeats],
    ) -> None:
        self._recorder, self._rank, self._beats_of = recorder, rank, beats_of
        self._timeout, self._seconds = timeout, seconds

        # What may be outstanding, with the heartbeat of ours that saw it first.
        self._pending: dict[Collective, int] = {}
        self._found: dict[Collective, _Found] = {}
        self._joined: set[Collective] = set()

    def stuck(self, heartbeat: int) -> str | None:
        """Name a collective that some rank has not joined in time; called at each heartbeat of ours.

        Never waits: a rank that wrote no heartbeat meanwhile would itself look stuck to others.
        """
        pending = self._recorder.pending()
        self._pending = {call: self._pending.get(call, heartbeat) for call in pending}
        self._joined.intersection_update(pending)

        overdue = [
            call
            for call, first in self._pending.items()
            if call not in self._joined and (heartbeat - first) * self._seconds >= self._timeout
        ]
        self._found = {call: found for call, found in self._found.items() if call in overdue}

        reports = (self._judge(call) for call in overdue)
        return next((report for report in reports if report is not None), None)

    def _judge(self, call: Collective) -> str | None:
        beats = self._beats_of([rank for rank in call.ranks if rank != self._rank])
        returned = call.returned
        found = self._found.get(call)

        # Where the call has returned meanwhile, a peer may have done so after its heartbeat.
        if found is None or found.returned != returned:
            numbers = {rank: beat["number"] for rank, beat in beats.items()}
            self._found[call] = _Found(returned, numbers)
            return None

        # A peer that writes no more heartbeats is a matter of peer_timeout.
        if not found.is_older_than(beats):
            return None
        if call.peer is not None:
            return self._report(call, beats)

        # Where the call has returned, the backend is asynchronous: so it should have on the others.
        counted = "returned" if returned else "begun"
        joined = {rank: beat[counted].get(call.group, 0) for rank, beat in beats.items()}
        fewest = min(joined.values(), default=call.number)
        if fewest < call.number:
            first = self._recorder.find(call.group, fewest + 1) or call
            absent = {rank: beats[rank] for rank in joined if joined[rank] < first.number}
            return self._report(first, absent)

        if returned:
            self._joined.add(call)
            return None
        return self._report(call, {})

    def _report(self, call: Collective, absent: Heartbeats) -> str:
        joined = sorted(set(call.ranks) - set(absent))
        missing = "; ".join(
            f"rank {rank}, which has begun {beat['begun'].get(call.group, 0)} and stands at {beat['at']}"
            for rank, beat in absent.items()
        )
        return (
            f"rank {self._rank} has waited {self._timeout:g} s (collective_timeout) in "
            f"{call}: ranks {joined} joined, "
            f"missing: {missing or 'none, so the network is slow or lost something'}"
        )
