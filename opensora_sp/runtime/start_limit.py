"""A limit on the time from the rendezvous to the first heartbeats, when no watchdog runs yet.

Process groups are made with the timeout of the run's collectives, half an hour. A rank that is
stopped meanwhile would hold the others that long, and nothing would name it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from opensora_sp.common.error_file import wait_until, write_error_file

from .bounded_store import BoundedStore
from .processes import exiting_after
from .rank_info import format_ranks
from .rendezvous import JOIN_TIMEOUT, join_timeout
from .stack_inspection import location_of_thread, stack_of_thread

logger = logging.getLogger(__name__)
RESPONSE_TIMEOUT = 3.0  # seconds for all ranks that run to report that, where some do not
REPORT_TIMEOUT = 2.0  # seconds for all of these to log the reason
CONNECT_TIMEOUT = 2.0  # seconds, also for each answer of the store
INTERVAL = 1.0  # seconds

# Names in the store: at which line a rank is, and that it has logged why it ends.
AT, REPORTED = "rank {} is at", "rank {} has reported"


class StartLimit:
    """``with StartLimit(store, rank, world_size):`` ends the process if the block takes too long.

    That is, longer than ``OPENSORA_SP_JOIN_TIMEOUT``. All ranks enter it at about the same time.
    Each then reports in the store that it runs, and names the ranks that do not.

    Args:
        store: of torch; None for a single process, which has no limit.
    """

    def __init__(self, store: Any | None, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout = join_timeout()
        self._ended = threading.Event()
        self._main_thread = threading.get_ident()

    def __enter__(self) -> None:
        if self._store is not None:
            threading.Thread(target=self._run, name="start limit", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        # Counted, so that a host that was suspended does not blame the others.
        for _ in range(max(1, round(self._timeout / INTERVAL))):
            if self._ended.wait(INTERVAL):
                return
        store, missing = None, list[int]()
        finding = "the store of the rendezvous did not respond"
        with suppress(RuntimeError):  # it does not answer, or refuses connections
            store = BoundedStore.connect(partial(_connect_again, self._store), CONNECT_TIMEOUT)
            missing = self._find_missing(store)
            finding = self._where_all_are(store) if not missing else _unresponsive(missing)

        if not self._ended.is_set():
            with exiting_after(RESPONSE_TIMEOUT, status=1):
                self._report(finding)
                if store is not None:
                    self._wait_until_all_have_reported(store, missing)
                os._exit(1)

    def _find_missing(self, store: BoundedStore) -> list[int]:
        """The ranks that do not respond."""
        keys = {rank: AT.format(rank) for rank in range(self._world_size)}
        store.set(keys[self._rank], location_of_thread(self._main_thread))
        wait_until(lambda: store.check(list(keys.values())), RESPONSE_TIMEOUT)
        return [rank for rank, key in keys.items() if not store.check([key])]

    def _where_all_are(self, store: BoundedStore) -> str:
        """At which lines the ranks are, where all of them respond."""
        at_line: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            at_line.setdefault(store.get(AT.format(rank)).decode(), []).append(rank)
        places = [f"{format_ranks(ranks)} at {line}" for line, ranks in at_line.items()]
        return f"all respond, {', '.join(places)}"

    def _wait_until_all_have_reported(self, store: BoundedStore, missing: list[int]) -> None:
        """A rank that ends breaks connections, which would end the others without a reason."""
        with suppress(RuntimeError):
            store.set(REPORTED.format(self._rank), "")
            others = [rank for rank in range(self._world_size) if rank not in missing]
            keys = [REPORTED.format(rank) for rank in others]
            wait_until(lambda: store.check(keys), REPORT_TIMEOUT)

    def _report(self, finding: str) -> None:
        reason = (
            f"got no process group of {self._world_size} ranks within {self._timeout:g} s: "
            f"{finding}; expected all ranks to start; look whether their processes "
            f"are stopped or cut off, or give slow hosts more time with {JOIN_TIMEOUT}=SECONDS"
        )
        logger.error("rank %d stops: %s", self._rank, reason)
        logger.error("rank %d was at:\n%s", self._rank, stack_of_thread(self._main_thread))
        write_error_file(reason)

        logging.shutdown()  # flushes
        sys.stdout.flush()


def _unresponsive(missing: list[int]) -> str:
    return f"{format_ranks(missing)} did not respond"


def default_store() -> dist.Store:
    """The store that the default process group was made with."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def _connect_again(store: Any) -> dist.Store:
    """Another client of the same store, with names of its own.

    A ``TCPStore`` makes one call at a time: while the main thread waits in one for a rank that is
    missing, it would seem that the store does not answer.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        limit = timedelta(seconds=CONNECT_TIMEOUT)
        store = dist.TCPStore(store.host, store.port, timeout=limit, wait_for_workers=False)

    # The store of torchrun outlives the ranks, so each attempt has names of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"opensora_sp/start/{attempt}", store)
