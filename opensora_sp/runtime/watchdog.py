"""The watchdog: a thread of each rank that detects failures and propagates them to all ranks.

=============================  ==============================  =====================================
failure                        detection                       reaction
=============================  ==============================  =====================================
a rank raises                  the exception leaves the block  propagated: the others report it and
                                                               exit
a rank is killed, same host    its process no longer exists    the others report it and exit
a rank is killed, other host   a lost connection, or no        the others report it and exit
                               heartbeat for ``peer_timeout``
a rank is stopped or cut off   no heartbeat for                the others report it and exit
                               ``peer_timeout``
rank 0 is, or its host         its store does not answer for   the others report it and exit
                               the shorter of both timeouts
a rank does not join a         ``collective_timeout``          the others report the collective and
collective                                                     the rank, and exit
a rank does not make the       ``OPENSORA_SP_JOIN_TIMEOUT``    the others report where all ranks
process group                                                  are, and exit
SIGTERM, SIGUSR1, Ctrl-C, the  a signal handler; the           ``stop_reason`` is set on all ranks;
launcher has exited            launcher's process has exited   a run that has not ended after
                                                               ``grace_time`` is ended
a second Ctrl-C                the signal handler              the process exits at once
=============================  ==============================  =====================================

Every second each rank writes a heartbeat into a store that rank 0 hosts, and reads the run's first
failure and a request to stop from it. Rank 0 reads all heartbeats, the others rank 0's.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from opensora_sp.common.console import INTERRUPTED
from opensora_sp.common.error_file import wait_until, write_error_file

from .collective_recorder import CollectiveRecorder, location_of_thread, stack_of_thread
from .processes import SignalHandler, exiting_after, is_alive, launchers
from .rendezvous import JOIN_TIMEOUT, first_line, join_timeout
from .run_store import PROCESS_ENDED, PROPAGATION_TIMEOUT, Heartbeat, RunStore
from .timeouts import COLLECTIVE_TIMEOUT, INTERVAL, CollectiveTimeout, PeerTimeout, backend_timeout

logger = logging.getLogger(__name__)
EXIT_TIMEOUT = 3.0  # seconds for the run to end by itself after a failure, before os._exit
HANG_TIMEOUT = 2.0  # seconds for ranks that respond to learn that another one does not
CONNECTION_ERRORS = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Socket",
    "gloo/transport",
    "NCCL",
)
FEWEST_SECONDS = 3.0  # to answer; a rank that was suspended may count one that it did not wait
OF_HANGS = ("(peer_timeout)", "(collective_timeout)", "cut off", "no process group")
"""In the reason where some rank does not respond: each rank then logs its stack."""
NOT_STOPPED = ", but the run did not stop within"


class _RunFailed(Exception):  # noqa: N818  (of the run, not of this code)
    """The run ends, for the reason given."""


class Watchdog:
    """Use as ``with Watchdog(store) as watchdog:`` around all distributed code of a run.

    It starts before the process group, which is made inside of the block.
    Entering and leaving are collective: all ranks leave the block normally, or none does. An
    exception that leaves the block is propagated to all other ranks, which exit with status 1
    unless they raise an error of their own. An exception that only reports a lost connection to
    another rank is replaced by ``SystemExit`` (status 1, or 130 after Ctrl-C), and the log names
    the rank that failed.

    Args:
        store: what ``join_rendezvous`` returned; None for a single process.
        peer_timeout: seconds without a heartbeat after which a rank counts as failed.
        collective_timeout: seconds after which a collective that some rank has not joined ends the
            run. Groups that are made inside of the block get it as their backend's timeout, with a
            margin; see ``backend_timeout``.
        grace_time: seconds that the run has to end after ``stop_reason`` was set; 0 if it does not
            look at ``stop_reason``.

    Attributes:
        stop_reason: why the run should stop after this step; None while it should not.
    """

    def __init__(
        self,
        store: RunStore | None = None,
        *,
        peer_timeout: float = 60.0,
        collective_timeout: float = COLLECTIVE_TIMEOUT,
        grace_time: float = 300.0,
    ) -> None:
        self.peer_timeout, self.grace_time = peer_timeout, grace_time
        self.stop_reason: str | None = None

        self._store = store or RunStore.alone()
        self._rank, self._world_size = self._store.rank, self._store.world_size
        self._others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._launchers = launchers()
        self._signals = SignalHandler()

        self._peer_timeout = PeerTimeout(peer_timeout)
        self._start_timeout, self._has_group = join_timeout(), False
        # A thread of torch serves the store: rank 0 answers whatever its main thread does.
        self._answer_timeout = max(FEWEST_SECONDS, min(peer_timeout, collective_timeout))
        self._recorder = CollectiveRecorder(backend_timeout(collective_timeout))
        self._collective_timeout = CollectiveTimeout(
            self._recorder,
            rank=self._rank,
            timeout=collective_timeout,
            read_heartbeats=self._store.heartbeats,
        )

        # Heartbeats: written, and at the request to stop.
        self._number, self._stop_number = 0, 0
        # The first one, of any rank.
        self._failure: str | None = None
        self._ended, self._is_reported = threading.Event(), False
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._world_size > 1:
            self._store.limit_answers(self._answer_timeout)
            self._recorder.start()
        self._signals.install()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # A script that calls sys.exit(0) has not failed.
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if error is not None and self._is_connection_error(error):
            self._find_failed_rank(error)

        self._ended.set()
        self._thread.join(PROPAGATION_TIMEOUT)
        try:
            if error is None:
                self._leave_with_all()
            else:
                self._propagate(error)
        finally:
            self._recorder.stop()
            self._signals.uninstall()

    @property
    def is_interrupted(self) -> bool:
        """True if the request to stop was Ctrl-C, on any rank."""
        return self._signals.received == "SIGINT" or self.why_to_stop().endswith("SIGINT")

    def why_to_stop(self) -> str:
        """``stop_reason`` of this rank, or of another one that this rank has not read yet."""
        if self.stop_reason is None:
            with suppress(RuntimeError):
                # The store is lost, which the thread reports.
                return self._store.stop_reason()
        return self.stop_reason or ""

    # The main thread: errors that leave the block, and the end of the run.

    def _is_connection_error(self, error: BaseException) -> bool:
        """True if another rank's failure may have caused this error."""
        return (
            self._world_size > 1
            and isinstance(error, RuntimeError)
            and any(text in str(error) for text in CONNECTION_ERRORS)
        )

    def _find_failed_rank(self, error: BaseException) -> None:
        """Wait for the reason of a lost connection; without one, blame ranks without heartbeats."""

        def wait_for_failure() -> None:
            wait_until(lambda: self._failure is not None, PROPAGATION_TIMEOUT)

        try:
            # The rank that failed usually says so a moment after its connections close.
            before = self._store.heartbeats(self._others)
            wait_for_failure()
            after = self._store.heartbeats(self._others)
        except RuntimeError:
            # Rank 0 has exited, which the thread notices.
            return wait_for_failure()

        silent = [rank for rank in self._others if after[rank].number == before[rank].number]
        if self._failure is None and silent:
            self._failure = self._store.claim_failure(
                f"ranks {silent} have failed: no heartbeat for {PROPAGATION_TIMEOUT:g} s, and "
                f"{error}"
            )

    def _propagate(self, error: BaseException) -> None:
        """Make an error the run's failure, unless another rank failed first and has caused it."""
        if self._failure is not None and self._is_connection_error(error):
            self._report(self._failure)
            self._store.wait_until_all_know()
            raise SystemExit(_exit_code(self._failure)) from None

        reason = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        self._failure = self._store.claim_failure(reason)

        # All ranks raise the same error, or this rank alone has one.
        is_same = self._failure.partition(":")[2] == reason.partition(":")[2]
        if not is_same:
            logger.error("%s (after %s)", reason, self._failure)
        elif self._rank == 0:
            logger.error("%s", reason)
        # torchrun prints the error file of the rank that failed first.
        write_error_file(self._failure)

        # Errors that users can fix are logged once: by rank 0, before it acknowledges them.
        all_know = self._store.wait_until_all_know()
        if is_same and self._rank and not (all_know and isinstance(error, ValueError)):
            logger.error("%s", reason)
        error.is_logged = True  # type: ignore[attr-defined]
        error.is_consequence = not is_same  # type: ignore[attr-defined]

    def _leave_with_all(self) -> None:
        """Mark this rank as having left. Rank 0 hosts the store, so it leaves last."""
        # The thread has lost the store, or waits for it; then so would this one.
        if not self._store.is_open or self._thread.is_alive():
            return

        with suppress(RuntimeError):
            self._write_heartbeat()
            if self._rank == 0:
                wait_until(self._all_have_left, self.peer_timeout)
        self._store.close()

    def _all_have_left(self) -> bool:
        peers = self._store.peers
        # A rank that was killed after its last collective will never write that it has left.
        living = [rank for rank in self._others if rank not in peers or is_alive(peers[rank])]
        return all(heartbeat.has_left for heartbeat in self._store.heartbeats(living).values())

    # The watchdog's thread.

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self._check()
            except _RunFailed as failure:
                return self._end_run(str(failure))
            except RuntimeError as error:
                # The connection to the store is lost.
                if self._ended.is_set():
                    return
                self._store.close()
                reason = first_line(error)
                or_hangs = "" if reason == PROCESS_ENDED else ", is stopped or is cut off"
                return self._end_run(
                    f"rank 0, which hosts the store of the heartbeats, has exited{or_hangs} "
                    f"({reason}); it was at {self._store.last_location(0)}"
                )
            except Exception:
                # An error of this code is no reason to end days of training.
                return logger.exception("the watchdog failed; the run continues without it")

    def _check(self) -> None:
        self._number += 1

        # Failures first: launchers send SIGTERM as well where another rank has failed.
        if self._world_size > 1:
            self._write_heartbeat()
            self._check_ranks()

        if self._signals.received:
            self._request_stop(self._signals.received)
        for launcher in self._launchers:
            if not is_alive(launcher):
                self._request_stop(f"the launcher (process {launcher.pid}) has exited")

        waited = (self._number - self._stop_number) * INTERVAL
        if self.stop_reason is not None and waited >= self.grace_time:
            late = f"{NOT_STOPPED} {self.grace_time:g} s (grace_time)" if self.grace_time else ""
            raise _RunFailed(self.stop_reason + late)

    def _check_ranks(self) -> None:
        """Raise the first failure of any rank; pass a request to stop on."""
        self._fail_if(self._store.failure())
        stop_reason = self._store.stop_reason()
        if stop_reason:
            self._request_stop(stop_reason)

        # Rank 0 alone reads all, or reads would grow with the square of the ranks.
        heartbeats = self._store.heartbeats(self._others if self._rank == 0 else [0])
        self._fail_if(self._peer_timeout.check(self._number, heartbeats))
        for rank, process in self._store.peers.items():
            if not is_alive(process) and not self._store.heartbeats([rank])[rank].has_left:
                raise _RunFailed(
                    f"rank {rank} (process {process.pid}) has exited without reporting an error: "
                    "it was killed, or crashed"
                )

        self._fail_if(self._collective_timeout.check(self._number))
        self._has_group = self._has_group or dist.is_initialized()
        if self._number * INTERVAL >= self._start_timeout and not self._has_group:
            self._fail_if(self._late_start())

    def _late_start(self) -> str:
        """A message with the lines of all ranks, which have made no process group in time."""
        heartbeats = self._store.heartbeats(list(range(self._world_size)))
        places = [f"rank {rank} at {newest.location}" for rank, newest in heartbeats.items()]
        return (
            f"got no process group of {self._world_size} ranks within {self._start_timeout:g} s: "
            f"{', '.join(places)}; expected all ranks to start; look what they wait for, or give "
            f"slow hosts more time with {JOIN_TIMEOUT}=SECONDS"
        )

    def _fail_if(self, failure: str | None) -> None:
        if failure:
            raise _RunFailed(failure)

    def _request_stop(self, reason: str) -> None:
        """Set ``stop_reason`` of this rank, and of the others when they read the store."""
        if self.stop_reason is not None:
            return

        if self._world_size > 1 and not reason.startswith("rank "):
            reason = f"rank {self._rank}: {reason}"
            self._store.request_stop(reason)
        self.stop_reason, self._stop_number = reason, self._number
        if self.grace_time:
            # In another thread: a log that waits for ever must not stop the watchdog.
            line = "%s; stopping within two steps, with a checkpoint"
            log = threading.Thread(target=logger.info, args=(line, reason), daemon=True)
            log.start()
            log.join(INTERVAL)

    def _end_run(self, reason: str) -> None:
        """Report a failure, propagate it, and end the process unless the run ends by itself."""
        # The first failure of any rank, so that all report one cause.
        self._failure = reason = self._store.claim_failure(reason)
        with exiting_after(PROPAGATION_TIMEOUT + 2 * EXIT_TIMEOUT, _exit_code(reason)):
            self._report_and_exit(reason)

    def _report_and_exit(self, reason: str) -> None:
        is_hang = any(words in reason for words in OF_HANGS)
        if not self._ended.is_set():
            self._report(reason)
            if is_hang:
                stack = stack_of_thread(self._main_thread)
                logger.error("rank %d was at:\n%s", self._rank, stack)

        # Where a rank does not respond, no run that waits for it ends by itself.
        all_know = self._store.wait_until_all_know(HANG_TIMEOUT if is_hang else PROPAGATION_TIMEOUT)
        if self._ended.wait(0 if is_hang and not all_know else EXIT_TIMEOUT):
            return

        # os._exit flushes nothing.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(_exit_code(reason))

    def _write_heartbeat(self) -> None:
        location = location_of_thread(self._main_thread)
        self._store.write(
            Heartbeat(
                self._number,
                **self._recorder.counts(),
                location=location,
                has_left=self._ended.is_set(),
                waits_for=self._recorder.peers(),
            )
        )

    def _report(self, reason: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.error("rank %d stops: %s", self._rank, reason)
            write_error_file(reason)


def _exit_code(reason: str) -> int:
    """130 if Ctrl-C ended the run. After Ctrl-C it may still fail for another reason."""
    return INTERRUPTED if re.fullmatch(rf"(rank \d+: )?SIGINT({NOT_STOPPED} .*)?", reason) else 1
