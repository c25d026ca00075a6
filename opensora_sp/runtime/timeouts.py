"""Ranks without heartbeats (``peer_timeout``), and collectives that some rank has not joined.

Time is counted in this rank's own heartbeats, so a process that was suspended blames nobody when it
resumes. A rank that has not joined a collective within ``collective_timeout`` is judged by
heartbeats that it wrote after the collective was overdue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from .collective_recorder import Collective, CollectiveRecorder
from .run_store import Heartbeat

INTERVAL = 1.0  # seconds from one heartbeat to the next
COLLECTIVE_TIMEOUT = 1800.0  # seconds, unless a config sets another
BACKEND_MARGIN = 60.0  # seconds that backends get beyond it, so that the watchdog reports first
# Heartbeats of this rank, in which a peer that waits for another rank may report that one.
PATIENT_HEARTBEATS = 4


def backend_timeout(collective_timeout: float = COLLECTIVE_TIMEOUT) -> timedelta:
    """For ``init_process_group``: longer than the watchdog's, so that it reports first."""
    return timedelta(seconds=collective_timeout + BACKEND_MARGIN)


class PeerTimeout:
    """Finds ranks that have written no heartbeat for ``timeout`` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._newest: dict[int, Heartbeat] = {}
        self._seen_at: dict[int, int] = {}

    def check(self, number: int, heartbeats: dict[int, Heartbeat]) -> str | None:
        """Report a silent rank; called at each heartbeat of this rank, which has a ``number``."""
        for rank, heartbeat in heartbeats.items():
            # Any change counts, so no clock of another host is read.
            if heartbeat != self._newest.get(rank):
                self._newest[rank], self._seen_at[rank] = heartbeat, number

            silent = (number - self._seen_at[rank]) * INTERVAL
            if silent >= self._timeout and not heartbeat.has_left:
                return (
                    f"rank {rank} has sent no heartbeat for {silent:g} s (peer_timeout); "
                    f"it was at {heartbeat.location}"
                )
        return None


@dataclass(frozen=True)
class _Snapshot:
    """An overdue collective when it was found: heartbeats of this rank and of its peers."""

    returned: bool
    at: int
    heartbeats: dict[int, int]

    def precedes(self, heartbeats: dict[int, Heartbeat]) -> bool:
        """True if each peer has written a whole heartbeat since, or has left the run.

        The first heartbeat after the snapshot may have been in progress, so it takes the second.
        """
        return all(
            heartbeat.has_left or heartbeat.number >= self.heartbeats[rank] + 2
            for rank, heartbeat in heartbeats.items()
        )


class CollectiveTimeout:
    """Tracks the collectives that this rank has called until all ranks are known to have joined.

    Args:
        timeout: seconds after which a collective is overdue.
        read_heartbeats: returns the newest heartbeats of some ranks.
    """

    def __init__(
        self,
        recorder: CollectiveRecorder,
        *,
        rank: int,
        timeout: float,
        read_heartbeats: Callable[[list[int]], dict[int, Heartbeat]],
    ) -> None:
        self._recorder, self._rank, self._read_heartbeats = recorder, rank, read_heartbeats
        self._timeout = timeout

        # What may be pending, with the number of this rank's heartbeat that saw it first.
        self._pending: dict[Collective, int] = {}
        self._overdue: dict[Collective, _Snapshot] = {}
        self._joined_by_all: set[Collective] = set()

    def check(self, heartbeat: int) -> str | None:
        """Report a collective that some rank has not joined in time; called at each heartbeat.

        Never waits: a rank that wrote no heartbeat meanwhile would itself seem to hang.
        """
        pending = self._recorder.pending()
        self._pending = {call: self._pending.get(call, heartbeat) for call in pending}
        self._joined_by_all.intersection_update(pending)

        overdue = [
            call
            for call, first in self._pending.items()
            if call not in self._joined_by_all and (heartbeat - first) * INTERVAL >= self._timeout
        ]
        self._overdue = {call: seen for call, seen in self._overdue.items() if call in overdue}

        reports = (self._check_overdue(call, heartbeat) for call in overdue)
        return next((report for report in reports if report is not None), None)

    def _check_overdue(self, call: Collective, heartbeat: int) -> str | None:
        heartbeats = self._read_heartbeats([rank for rank in call.ranks if rank != self._rank])
        returned = call.returned

        # Where the call has returned meanwhile, a peer may have done so after its heartbeat.
        snapshot = self._overdue.get(call)
        if snapshot is None or snapshot.returned != returned:
            numbers = {rank: newest.number for rank, newest in heartbeats.items()}
            self._overdue[call] = _Snapshot(returned, heartbeat, numbers)
            return None

        if not snapshot.precedes(heartbeats):
            # A peer that writes none is stopped or cut off, and left to peer_timeout.
            return None
        if call.peer is not None:
            # The peer itself waits for a third rank, which is to be blamed.
            others = set(heartbeats[call.peer].waits_for) - {self._rank}
            if others and heartbeat - snapshot.at < PATIENT_HEARTBEATS:
                return None
            return self._report(call, heartbeats)

        # Where the call has returned, the backend is asynchronous: peers must have returned, too.
        counts = {
            rank: (newest.returned if returned else newest.called).get(call.group, 0)
            for rank, newest in heartbeats.items()
        }
        fewest = min(counts.values(), default=call.number)
        if fewest < call.number:
            # The first that some rank lacks: later ones wait for it.
            first = self._recorder.find(call.group, fewest + 1) or call
            missing = [rank for rank, count in counts.items() if count < first.number]
            return self._report(first, {rank: heartbeats[rank] for rank in missing})

        if returned:
            self._joined_by_all.add(call)
            return None
        return self._report(call, {}, elsewhere=heartbeats)

    def _report(
        self,
        call: Collective,
        absent: dict[int, Heartbeat],
        elsewhere: dict[int, Heartbeat] | None = None,
    ) -> str:
        """A message with the ranks that are absent.

        Where none is, ranks may have called different collectives: it has ranks of ``elsewhere``
        that are at another line than this one's call.
        """
        joined = sorted(set(call.ranks) - set(absent))
        others = [
            f", or ranks have called another collective: rank {rank} is at {heartbeat.location}"
            for rank, heartbeat in (elsewhere or {}).items()
            if heartbeat.location != call.location
        ]
        missing = "; ".join(
            f"rank {rank}, which has called {heartbeat.called.get(call.group, 0)} and is at "
            f"{heartbeat.location}"
            for rank, heartbeat in absent.items()
        )
        return (
            f"rank {self._rank} has waited {self._timeout:g} s (collective_timeout) for {call}: "
            f"ranks {joined} joined, missing: "
            f"{missing or 'none, so the network is slow or has lost data'}{''.join(others[:1])}"
        )
