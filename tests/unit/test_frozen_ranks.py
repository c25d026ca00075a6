"""Ranks that stop writing heartbeats: how the others learn of it, and when."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from exits import recorded_exits
from polling import wait_until

from opensora_sp.runtime import timeouts, watchdog
from opensora_sp.runtime.collective_recorder import Collective
from opensora_sp.runtime.run_store import Heartbeat, RunStore
from opensora_sp.runtime.timeouts import CollectiveTimeout
from opensora_sp.runtime.watchdog import Watchdog

TIMEOUT = 12  # seconds of collective_timeout, and heartbeats of a rank in that time
RANKS = 3


class Peers:
    """The heartbeats of all ranks, in a run that waits in one collective."""

    def __init__(self, frozen: int, own: int, call: Collective) -> None:
        self.frozen, self.number = frozen, 0
        recorder: Any = SimpleNamespace(pending=lambda: [call], find=lambda group, number: call)
        self.check = CollectiveTimeout(
            recorder, rank=own, timeout=float(TIMEOUT), read_heartbeats=self.read
        ).check

    def read(self, ranks: list[int]) -> dict[int, Heartbeat]:
        return {rank: self.of(rank) for rank in ranks}

    def of(self, rank: int) -> Heartbeat:
        if rank == self.frozen:
            return Heartbeat(4, {"0": 6}, {"0": 6}, "a line of the model", False)
        return Heartbeat(self.number, {"0": 7}, {"0": 7}, "the collective", False)

    def first_report(self) -> tuple[int, str | None]:
        """The heartbeat at which this rank reports something; None after a minute."""
        for self.number in range(60):
            report = self.check(self.number)
            if report is not None:
                return self.number, report
        return self.number, None


def waiting_call(*, returned: bool = False) -> Collective:
    ranks = tuple(range(RANKS))
    return Collective("all_reduce", [], "0", 7, ranks, None, "a line", returned=returned)


@pytest.mark.parametrize("returned", [False, True], ids=["gloo", "NCCL"])
def test_a_rank_without_heartbeats_is_left_to_peer_timeout(returned: bool) -> None:
    """It may compute for long, holding Python's lock."""
    assert Peers(1, 0, waiting_call(returned=returned)).first_report() == (59, None)


def test_a_rank_that_others_wait_for_but_that_writes_heartbeats_is_judged_by_these() -> None:
    peers = Peers(RANKS, 0, waiting_call())  # nobody is frozen
    _, report = peers.first_report()
    assert report is not None and report.endswith(
        "missing: none, so the network is slow or has lost data, or ranks have called another "
        "collective: rank 1 is at the collective"
    )


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[RunStore]:
    """The stores of two ranks that have joined, of which this process is both."""
    monkeypatch.setenv("OPENSORA_SP_JOIN_TIMEOUT", "0.5")
    for module in (timeouts, watchdog):
        monkeypatch.setattr(module, "INTERVAL", 0.1)
    monkeypatch.setattr(watchdog, "HANG_TIMEOUT", 0.1)
    processes = [("machine 0", 1), ("machine 1", 2)]
    first = RunStore.host("127.0.0.1", processes, dist.HashStore())
    second = RunStore(1, first.place, dist.HashStore())
    second.connect(5.0)
    return [first, second]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_freezes_before_its_first_heartbeat_is_named(
    frozen: int, two_ranks: list[RunStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Its process group would wait for the long timeout of collectives."""
    with recorded_exits() as codes, Watchdog(two_ranks[1 - frozen], peer_timeout=0.3):
        wait_until(lambda: codes)
    assert codes == [1]
    assert (
        f"rank {1 - frozen} stops: rank {frozen} has sent no heartbeat for 0.3 s (peer_timeout); "
        "it was at an unknown line"
    ) in caplog.text
    assert f"rank {1 - frozen} was at" in caplog.text


def test_a_rank_that_runs_and_makes_no_process_group_is_found_by_its_line(
    two_ranks: list[RunStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that waits for a dead mount."""
    first, second = two_ranks
    with recorded_exits() as codes, Watchdog(first, peer_timeout=2.0):
        for number in range(600):
            second.write(Heartbeat(number, {}, {}, "a dead mount", False))
            if codes:
                break
            time.sleep(0.05)
    assert codes == [1]
    assert "rank 0 stops: got no process group of 2 ranks within 0.5 s: rank 0 at " in caplog.text
    assert "rank 1 at a dead mount; expected all ranks to start" in caplog.text


class Stuck(logging.Handler):
    """A log that waits for a full pipe or a dead mount, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.released.wait(30)


def test_a_run_whose_log_is_stuck_ends_after_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL", "EXIT_TIMEOUT", "PROPAGATION_TIMEOUT"):
        monkeypatch.setattr(watchdog, name, 0.1)
    stuck, log = Stuck(), logging.getLogger("opensora_sp")
    log.addHandler(stuck)
    try:
        with recorded_exits() as codes, Watchdog(grace_time=0.3) as watch:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: bool(codes))
            assert codes == [1] and watch.stop_reason == "SIGTERM"
            stuck.released.set()
    finally:
        stuck.released.set()
        log.removeHandler(stuck)


class Sends(Peers):
    """Heartbeats in a run in which rank 2 sends to rank 0, and rank 0 may wait for rank 1."""

    def __init__(self, own: int, peer: int, waits_for: list[int]) -> None:
        operation = "recv" if own == 0 else "send"
        super().__init__(
            -1, own, Collective(operation, [], "0", 7, (own, peer), peer, "writer.py:210")
        )
        self.waits_for = waits_for

    def of(self, rank: int) -> Heartbeat:
        return replace(super().of(rank), waits_for=self.waits_for if rank == 0 else [])


def test_a_sender_leaves_the_report_to_a_peer_that_waits_for_another_rank() -> None:
    """In a save, rank 0 receives from rank 1, which has left, while rank 2 sends to rank 0."""
    reported, report = Sends(own=0, peer=1, waits_for=[1]).first_report()
    assert report is not None and "missing: rank 1, which" in report

    later, report = Sends(own=2, peer=0, waits_for=[1]).first_report()
    assert report is not None and reported + 2 <= later <= TIMEOUT + 8

    # Rank 0 waits for this one alone, or for none.
    for waits_for in ([2], []):
        assert Sends(own=2, peer=0, waits_for=waits_for).first_report()[0] == reported
