"""A thread of each rank that sees to it that a run ends on all ranks, and with a reason.

========================================  ============================================================================
what happens                              what the watch does
========================================  ============================================================================
a rank raises                             tells the error to all ranks; those say whose it is and exit
a rank is killed                          on its own machine seen at once, by its process number; elsewhere as below
a rank is not heard of                    after ``peer_timeout`` the others name it and exit
a rank does not join a collective         after ``collective_timeout`` the others name the collective and the rank
SIGTERM, Ctrl-C, or the launcher is gone  ``stop_reason`` is set, for the run to end well; after ``grace_time`` it exits
a second Ctrl-C                           the process exits at once
========================================  ============================================================================

Every second each rank writes a line, its beat, into a store that rank 0 keeps (a ``TCPStore`` beside the one of the
process group), where the first failure is told too. Rank 0 reads all beats, the others that of rank 0. Time without a
sign of life is counted in one's own beats, so a process that was stopped accuses nobody when it goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from opensora_sp.console import INTERRUPTED, tell_launcher

from .collective_recorder import CollectiveRecorder
from .overdue import OverdueCollectives
from .processes import Process, launchers, machine, this_process
from .stack_inspection import stands_at

logger = logging.getLogger(__name__)
BEAT = 1.0  # seconds from one beat to the next
HEARD = 5.0  # seconds in which all ranks are given to hear of a failure
LEAVE = 3.0  # and for what the run does by itself after it
SAME_INTERRUPT = (
    1.0  # seconds in which SIGINT of a terminal and of a launcher that sends it on count as one
)
COLLECTIVE_TIMEOUT = 1800.0  # seconds, unless a config has another one
BACKEND_MARGIN = (
    60.0  # from collective_timeout to that of the backends, so that our report comes first
)
LOST = ("Connection closed", "Connection reset", "Broken pipe", "Socket", "gloo/transport", "NCCL")
NOTHING = "-"  # what the store says where nothing was told


class _End(Exception):  # noqa: N818  (not an error of this program)
    """The run ends here, for the reason told."""


class Watch:
    """``with Watch(...) as watch:`` around all that ranks do together, once their process group exists. Collective.

    An exception that leaves the block is told to all other ranks, which exit with status 1 unless they are about to
    leave it by themselves. Where it says no more than that a peer's connection was lost, it becomes ``SystemExit``
    with that status, 130 after Ctrl-C, and the log says which rank failed.
    Must be left normally by all ranks or by none.

    Args:
        peer_timeout: seconds without a sign of life after which a rank is given up.
        collective_timeout: seconds after which a collective that some ranks have not joined ends the run. Groups that
            are made inside of the block get it as their backend's timeout, with a margin; see ``backend_timeout``.
        grace_time: seconds that the run has to end after ``stop_reason`` was set; 0 if it does not look at that.
    """

    def __init__(
        self,
        *,
        peer_timeout: float = 60.0,
        collective_timeout: float = COLLECTIVE_TIMEOUT,
        grace_time: float = 300.0,
    ) -> None:
        self.peer_timeout, self.collective_timeout, self.grace_time = (
            peer_timeout,
            collective_timeout,
            grace_time,
        )
        self.stop_reason: str | None = None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._others = [rank for rank in range(self._world) if rank != self._rank]
        self._launchers = launchers()
        self._signalled, self._beats, self._stop_beat = "", 0, 0
        self._interrupted_at: float | None = None
        self._failure: str | None = None  # the first one, of any rank
        self._heard: dict[
            int, tuple[str, int]
        ] = {}  # by rank: its last beat, and when, in beats of ours, it came
        self._recorder = CollectiveRecorder(backend_timeout(collective_timeout))
        self._overdue = OverdueCollectives(
            self._recorder,
            rank=self._rank,
            timeout=collective_timeout,
            seconds=BEAT,
            beats_of=self._beats_of,
        )
        self._ended, self._announced, self._counted = threading.Event(), False, False
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._store: Any = None
        self._peers: dict[int, Process] = {}
        if self._world > 1:
            self._meet()
            self._recorder.start()
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._former_handlers = {
                number: signal.signal(number, self._on_signal) or signal.SIG_DFL
                for number in (signal.SIGTERM, signal.SIGINT)
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if error is not None and self._is_secondary(error):
            self._wait_for_a_reason(error)
        self._ended.set()
        self._thread.join(HEARD)
        try:
            if error is None:
                self._leave_with_all()
            else:
                self._tell(error)
        finally:
            self._recorder.stop()
            if self._in_main_thread:
                for number, handler in self._former_handlers.items():
                    signal.signal(number, handler)

    @property
    def is_interrupted(self) -> bool:
        """Whether it was Ctrl-C, on any rank, that asked the run to stop."""
        return self._signalled == "SIGINT" or self.why_to_stop().endswith("SIGINT")

    def why_to_stop(self) -> str:
        """``stop_reason`` of this rank, or that of another one, of which this rank need not have heard yet."""
        return self.stop_reason or self._read("stop")[0]

    # What the main thread does

    def _meet(self) -> None:
        """Rank 0 opens the store; all ranks tell each other where they are, and write their first beat."""
        mine = (machine(), this_process())
        seen: list[Any] = [None] * self._world
        dist.all_gather_object(seen, mine)
        self._peers = {
            rank: process
            for rank, (place, process) in enumerate(seen)
            if rank != self._rank and place == mine[0] and process is not None
        }
        together = all(place == mine[0] for place, _ in seen)
        host = "127.0.0.1" if together else os.environ.get("MASTER_ADDR", os.uname().nodename)
        port: list[Any] = [None]
        how: dict[str, Any] = dict(
            timeout=timedelta(seconds=self.peer_timeout), wait_for_workers=False
        )
        if self._rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, **how)
            self._store.set("failure", NOTHING)
            self._store.set("stop", NOTHING)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0)
        if self._rank:
            self._store = dist.TCPStore(host, port[0], is_master=False, **how)
        self._write_beat()
        dist.barrier()

    def _on_signal(self, number: int, frame: Any) -> None:
        # After SIGINT, torchrun passes a second Ctrl-C on as SIGTERM.
        now = time.monotonic()
        if self._interrupted_at is not None and now - self._interrupted_at >= SAME_INTERRUPT:
            os._exit(INTERRUPTED)
        if number == signal.SIGINT and self._interrupted_at is None:
            self._interrupted_at = now

        # The thread reports it: logging here could meet a lock that this thread holds.
        if self._signalled != "SIGINT":
            self._signalled = signal.Signals(number).name

    def _is_secondary(self, error: BaseException) -> bool:
        """Whether an error may well be another rank's doing."""
        return (
            self._world > 1
            and isinstance(error, RuntimeError)
            and any(sign in str(error) for sign in LOST)
        )

    def _wait_for_a_reason(self, error: BaseException) -> None:
        """Until the thread knows why a connection was lost; if it does not, look who has fallen silent meanwhile."""
        try:
            before = self._beats_of(self._others)
            _wait_for(lambda: self._failure is not None, HEARD)
            after = self._beats_of(self._others)
        except RuntimeError:  # rank 0 has gone, which the thread notices
            return _wait_for(lambda: self._failure is not None, HEARD)
        silent = [rank for rank in self._others if after[rank]["number"] == before[rank]["number"]]
        if self._failure is None and silent:
            self._failure = self._claim(
                f"ranks {silent} have gone: no sign of life for {HEARD:g} s, and {error}"
            )

    def _tell(self, error: BaseException) -> None:
        """Our error is the run's, unless another rank's came first and has caused ours."""
        if self._failure is not None and self._is_secondary(error):
            self._announce(self._failure)
            self._wait_until_heard()
            raise SystemExit(_exit_code(self._failure)) from None
        own = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        self._failure = self._claim(own)
        is_same = (
            self._failure.partition(":")[2] == own.partition(":")[2]
        )  # raised by all, or by this rank alone
        if not is_same:
            logger.error("%s (after %s)", own, self._failure)
        elif self._rank == 0:
            logger.error("%s", own)
        tell_launcher(self._failure)

        # What users can mend stands once in the log: rank 0 logs it, before it counts as one that has heard.
        all_heard = self._wait_until_heard()
        if is_same and self._rank and not (all_heard and isinstance(error, ValueError)):
            logger.error("%s", own)
        error.is_logged = True  # type: ignore[attr-defined]

    def _leave_with_all(self) -> None:
        """The store goes with rank 0, so rank 0 is the last to leave."""
        if self._store is None or self._thread.is_alive():
            return
        self._write_beat()
        if self._rank == 0:
            with suppress(RuntimeError):
                _wait_for(self._all_have_left, self.peer_timeout)

    def _all_have_left(self) -> bool:
        living = [
            rank for rank in self._others if rank not in self._peers or self._peers[rank].is_alive
        ]
        return all(beat["left"] for beat in self._beats_of(living).values())

    # What the thread does

    def _run(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                self._look()
            except _End as end:
                return self._exit(str(end))
            except RuntimeError as error:  # of the store
                if self._ended.is_set():
                    return
                self._store = None
                reason = (str(error) or type(error).__name__).splitlines()[0]
                return self._exit(
                    f"rank 0, which keeps the store, has gone or does not answer ({reason})"
                )
            except Exception:
                return logger.exception("the watch has failed, and the run goes on without it")

    def _look(self) -> None:
        self._beats += 1
        if self._world > 1:  # first of all: launchers send SIGTERM too where another rank has ended
            self._write_beat()
            self._listen()
            stuck = self._overdue.stuck(self._beats)
            if stuck is not None:
                raise _End(stuck)
        if self._signalled:
            self._ask_to_stop(self._signalled)
        gone = next((one for one in self._launchers if not one.is_alive), None)
        if gone is not None:
            self._ask_to_stop(
                f"the launcher{f' (process {gone.pid})' if gone.pid else ''} has gone"
            )
        if (
            self.stop_reason is not None
            and (self._beats - self._stop_beat) * BEAT >= self.grace_time
        ):
            after = f", and no step and checkpoint in {self.grace_time:g} s (grace_time) after it"
            raise _End(f"{self.stop_reason}{after if self.grace_time else ''}")

    def _listen(self) -> None:
        """Take in what the store says: failures, wishes to stop, signs of life."""
        watched = self._others if self._rank == 0 else [0]
        failure, stop, *beats = self._read("failure", "stop", *(f"beat {rank}" for rank in watched))
        if failure != NOTHING:
            raise _End(failure)
        if stop != NOTHING and self.stop_reason is None:
            self._ask_to_stop(stop)
        for rank, beat in zip(watched, beats, strict=True):
            if beat != self._heard.get(rank, ("", 0))[0]:
                self._heard[rank] = (beat, self._beats)
            silent = (self._beats - self._heard[rank][1]) * BEAT
            if silent >= self.peer_timeout and not json.loads(beat)["left"]:
                raise _End(f"rank {rank} has given no sign of life for {silent:g} s (peer_timeout)")
        for rank, process in self._peers.items():
            if not process.is_alive and not self._beats_of([rank])[rank]["left"]:
                raise _End(
                    f"rank {rank} (process {process.pid}) has gone without a word: it was killed, or crashed"
                )

    def _ask_to_stop(self, reason: str) -> None:
        """Set ``stop_reason``, and that of the other ranks when they read it."""
        if self.stop_reason is not None:
            return
        if self._world > 1 and not reason.startswith("rank "):
            reason = f"rank {self._rank}: {reason}"
            self._kept().set("stop", reason)
        if self.grace_time:
            logger.info(
                "%s; stopping after this step, with a checkpoint", reason
            )  # rank 0 says it for all
        self.stop_reason, self._stop_beat = reason, self._beats

    def _exit(self, reason: str) -> None:
        """Say why, let all others hear it and the run end by itself; where it does not, end the process."""
        self._failure = reason = self._claim(reason)
        if not self._ended.is_set():
            self._announce(reason)
        self._wait_until_heard()
        if self._ended.wait(LEAVE):
            return
        logging.shutdown()  # flushes
        sys.stdout.flush()
        os._exit(_exit_code(reason))

    # The store

    def _write_beat(self) -> None:
        beat = {
            "number": self._beats,
            **self._recorder.counts(),
            "at": stands_at(self._main),
            "left": self._ended.is_set(),
        }
        self._kept().set(f"beat {self._rank}", json.dumps(beat))

    def _kept(self) -> Any:
        """The store, which is not tried any more where it is seen to be lost: torch would print stacks for each try."""
        if 0 in self._peers and not self._peers[0].is_alive:
            self._store = None
        if self._store is None:
            raise RuntimeError("its process has ended")
        return self._store

    def _read(self, *keys: str) -> list[str]:
        return [value.decode() for value in self._kept().multi_get(list(keys))]

    def _beats_of(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        beats = self._read(*(f"beat {rank}" for rank in ranks)) if ranks else []
        return {rank: json.loads(beat) for rank, beat in zip(ranks, beats, strict=True)}

    def _claim(self, reason: str) -> str:
        """Make this the run's failure unless there is one already; returns the one that counts."""
        try:
            return self._kept().compare_set("failure", NOTHING, reason).decode()
        except RuntimeError:
            return reason  # there is none, or rank 0 has gone, and the store with it

    def _wait_until_heard(self) -> bool:
        """Until all ranks that live have heard of the failure, or for so long as it should take; whether they have."""
        with suppress(RuntimeError):  # no store, or rank 0 was faster
            store = self._kept()
            living = self._world - sum(not process.is_alive for process in self._peers.values())
            if not self._counted:
                self._counted = True
                store.add("heard", 1)
            _wait_for(lambda: store.add("heard", 0) >= living, HEARD)
            return bool(store.add("heard", 0) >= living)
        return False

    def _announce(self, reason: str) -> None:
        if not self._announced:
            self._announced = True
            logger.error("rank %d stops: %s", self._rank, reason)
            tell_launcher(reason)


def backend_timeout(collective_timeout: float = COLLECTIVE_TIMEOUT) -> timedelta:
    """For ``init_process_group``: late enough that the watchdog reports before the backend aborts."""
    return timedelta(seconds=collective_timeout + BACKEND_MARGIN)


def _exit_code(reason: str) -> int:
    """By what ended the run: after Ctrl-C it may still fail for another reason."""
    interrupted = re.fullmatch(r"(rank \d+: )?SIGINT(, and no step .*)?", reason)
    return INTERRUPTED if interrupted else 1


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(BEAT / 10)
