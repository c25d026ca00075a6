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
from typing import Any

import torch.distributed as dist

from opensora_sp.error_file import write_error_file
from opensora_sp.polling import wait_until

from .bounded_store import BoundedStore
from .processes import exiting_after
from .rank_info import format_ranks
from .rendezvous import JOIN_TIMEOUT, join_timeout
from .stack_inspection import stack_of_thread

logger = logging.getLogger(__name__)
RESPONSE_TIMEOUT = 3.0  # seconds for all ranks that run to report that, where some do not
INTERVAL = 1.0  # seconds


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

    @classmethod
    def after(cls, rendezvous: BoundedStore | None) -> StartLimit:
        """For the process group that is made after ``join_rendezvous``, which returns the store."""
        rank, world_size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        return cls(None if rendezvous is None else rendezvous.store, rank, world_size)

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
        missing = self._find_missing()
        if not self._ended.is_set():
            with exiting_after(RESPONSE_TIMEOUT, status=1):
                self._end_run(missing)

    def _find_missing(self) -> list[int]:
        """The ranks that do not respond; empty if that cannot be found out."""
        missing: list[int] = []
        with suppress(RuntimeError):  # the store does not answer either
            store = BoundedStore(self._store, RESPONSE_TIMEOUT)
            store.set(_key(self._rank), "")

            keys = {rank: _key(rank) for rank in range(self._world_size)}
            wait_until(lambda: store.check(list(keys.values())), RESPONSE_TIMEOUT)
            missing = [rank for rank, key in keys.items() if not store.check([key])]
        return missing

    def _end_run(self, missing: list[int]) -> None:
        names = format_ranks(missing) if missing else "the store of the rendezvous"
        reason = (
            f"got no process group of {self._world_size} ranks within {self._timeout:g} s: "
            f"{names} did not respond; expected all ranks to start; look whether their processes "
            f"are stopped or cut off, or give slow hosts more time with {JOIN_TIMEOUT}=SECONDS"
        )
        logger.error("rank %d stops: %s", self._rank, reason)
        logger.error("rank %d was at:\n%s", self._rank, stack_of_thread(self._main_thread))
        write_error_file(reason)

        logging.shutdown()  # flushes
        sys.stdout.flush()
        os._exit(1)


def default_store() -> dist.Store:
    """The store that the default process group was made with."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("opensora_sp/start", store)


def _key(rank: int) -> str:
    return f"rank {rank} runs"
