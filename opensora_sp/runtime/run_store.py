"""The store of a run, hosted by rank 0: heartbeats, the stop request, the first failure.

Each call ends, whatever happens to its server. torch's ``TCPStore`` sends a request and then reads
the answer without a limit: its ``timeout`` is kept by the server. A server that is stopped
(SIGSTOP), a frozen host or a network that drops packets would hold the caller for ever, with the
timeouts of all other ranks that it watches.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import psutil
import torch.distributed as dist

from opensora_sp.common import console
from opensora_sp.common.error_file import wait_until
from opensora_sp.common.files import parse_json

from .processes import is_alive, machine_id

SLICE = 1.0  # seconds
CONNECT_MARGIN = 2.0  # seconds beyond the timeout of torch, which then reports the reason itself
PROCESS_ENDED = "its process has ended"
PROPAGATION_TIMEOUT = 5.0  # seconds for all ranks to learn of a failure

Calls = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]
"""Calls for a thread, each with the place for its result; None ends the thread."""


class BoundedStore:
    """The methods of a store, of which each raises RuntimeError after ``timeout`` seconds.

    After the first one that did so, all raise at once. A daemon thread makes the calls, one after
    the other, and may wait for ever: no process waits for it at its end.

    Attributes:
        store: the store itself, whose methods have no bound.
        timeout: may be changed from call to call.

    Waiting is counted in slices, so a process that resumes after being suspended still reads the
    answer that arrived meanwhile.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self.store, self.timeout = store, timeout
        self._is_lost = False
        self._calls: Calls = SimpleQueue()
        # The thread does not refer to this object, which is collected when its run has ended.
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_serve, args=(self._calls,), name="store", daemon=True).start()

    @classmethod
    def connect(cls, make: Callable[[], Any], timeout: float) -> BoundedStore:
        """Make the store within about ``timeout``.

        torch's constructor limits the time to connect, but not the wait for a first answer.
        """
        bounded = cls(None, timeout + CONNECT_MARGIN)
        bounded.store = bounded._call(make)
        bounded.timeout = timeout
        return bounded

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self.store, method))

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self._is_lost:
            raise RuntimeError("it did not answer before")

        answer: Future[Any] = Future()
        self._calls.put((partial(method, *args), answer))
        timeout = self.timeout
        for _ in range(max(1, round(timeout / SLICE))):
            with suppress(NotDone):
                return answer.result(SLICE)

        self._is_lost = True
        atexit.register(_exit_despite_a_call)
        raise RuntimeError(f"no answer for {timeout:g} s")


def _exit_despite_a_call() -> None:
    """End a process in which a thread may still wait for an answer.

    If that came while the interpreter is finalized, the thread would abort the process. The status
    is the script's, or 1 where it has none: its store is lost.
    """
    # os._exit flushes nothing.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(console.exit_status or 1)


def _serve(calls: Calls) -> None:
    while (request := calls.get()) is not None:
        call, answer = request
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

        # They hold the store, whose server lives as long as it does.
        del request, call, answer


@dataclass(frozen=True)
class Heartbeat:
    """Report of a rank, once a second.

    Attributes:
        number: heartbeats that the rank has written before.
        called: by process group, how many collectives the rank has called.
        returned: how many of these have returned to the host.
        location: the line of source that its main thread runs.
        has_left: True once the rank has left the run.
        waits_for: the ranks that it sends to or receives from at the moment.
    """

    number: int
    called: dict[str, int]
    returned: dict[str, int]
    location: str
    has_left: bool
    waits_for: list[int] = field(default_factory=list)


NO_HEARTBEAT = Heartbeat(-1, {}, {}, "an unknown line", False)


@dataclass(frozen=True)
class Place:
    """Address of the store, and the process of each rank as (machine, number)."""

    address: str
    port: int
    processes: list[tuple[str, int]]


class RunStore:
    """A ``TCPStore`` that rank 0 hosts, in addition to the launcher's, which may end before it.

    All methods raise RuntimeError if the connection is lost, or if rank 0 does not answer within
    ``answer_timeout`` seconds.

    Attributes:
        launch_store: the launcher's store, in which the default process group is made.
        peers: processes of the other ranks on this host, which can be watched directly.
    """

    def __init__(
        self, rank: int, place: Place, launch_store: dist.Store, server: dist.TCPStore | None = None
    ) -> None:
        self.rank, self.world_size = rank, len(place.processes)
        self.place, self.launch_store = place, launch_store
        self.peers: dict[int, psutil.Process] = {}
        self._store = None if server is None else BoundedStore(server, 60.0)
        self._newest: dict[int, Heartbeat] = {}

        for peer, (machine, pid) in enumerate(place.processes):
            if peer != rank and machine == machine_id():
                with suppress(psutil.NoSuchProcess):
                    # It has exited: the lost connection will be reported.
                    self.peers[peer] = psutil.Process(pid)

    @classmethod
    def alone(cls) -> RunStore:
        """For a single process, which has no server."""
        return cls(0, Place("", 0, [("", 0)]), dist.HashStore())

    @classmethod
    def host(
        cls, address: str, processes: list[tuple[str, int]], launch_store: dist.Store
    ) -> RunStore:
        """Rank 0: listen at a free port.

        Raises:
            RuntimeError: if this host has no such address.
        """
        server = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        # Set beforehand: reading a key that is missing waits for it.
        server.set("failure", "")
        server.set("stop", "")
        for rank in range(len(processes)):
            server.set(f"heartbeat {rank}", json.dumps(asdict(NO_HEARTBEAT)))
        return cls(0, Place(address, server.port, processes), launch_store, server)

    def connect(self, timeout: float) -> None:
        """Ranks that do not host the store: connect to it within about ``timeout`` seconds."""
        limit, place = timedelta(seconds=timeout), self.place
        client = partial(
            dist.TCPStore, place.address, place.port, timeout=limit, wait_for_workers=False
        )
        self._store = BoundedStore.connect(client, timeout)

    def close(self) -> None:
        self._store = None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def limit_answers(self, timeout: float) -> None:
        """Set the seconds after which a store that does not answer is lost."""
        if self._store is not None:
            self._store.timeout = timeout

    def write(self, heartbeat: Heartbeat) -> None:
        self._connected().set(f"heartbeat {self.rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: list[int]) -> dict[int, Heartbeat]:
        """The newest heartbeats of some ranks."""
        if not ranks:
            return {}

        texts = self._connected().multi_get([f"heartbeat {rank}" for rank in ranks])
        for rank, text in zip(ranks, texts):
            self._newest[rank] = Heartbeat(**parse_json(text, f"the heartbeat of rank {rank}"))
        return {rank: self._newest[rank] for rank in ranks}

    def last_location(self, rank: int) -> str:
        """The line of a rank by the newest heartbeat that was read; asks nobody."""
        return self._newest.get(rank, NO_HEARTBEAT).location

    def failure(self) -> str:
        """The run's first failure; empty if there is none."""
        return str(self._connected().get("failure").decode())

    def stop_reason(self) -> str:
        """Why some rank requested to stop; empty if none did."""
        return str(self._connected().get("stop").decode())

    def request_stop(self, reason: str) -> None:
        self._connected().set("stop", _encodable(reason))

    def claim_failure(self, reason: str) -> str:
        """Make this the run's failure unless it has one already; returns the run's failure."""
        try:
            text = _encodable(reason)
            # Compared and set in one operation: of two ranks that fail at once, one is the first.
            return str(self._connected().compare_set("failure", "", text).decode())
        except RuntimeError:
            # Rank 0 has exited, or does not answer.
            return reason

    def wait_until_all_know(self, timeout: float = PROPAGATION_TIMEOUT) -> bool:
        """Acknowledge the failure; returns True if all living ranks did so in time."""
        with suppress(RuntimeError):
            # Rank 0 may have left before.
            store = self._connected()
            store.timeout = timeout
            store.set(f"acknowledged {self.rank}", "")

            gone = {rank for rank, process in self.peers.items() if not is_alive(process)}
            living = [rank for rank in range(self.world_size) if rank not in gone]
            names = [f"acknowledged {rank}" for rank in living]
            return wait_until(lambda: bool(store.check(names)), timeout)
        return False

    def _connected(self) -> BoundedStore:
        """The store, not tried after rank 0 has exited: torch would print a stack each time."""
        if 0 in self.peers and not is_alive(self.peers[0]):
            self.close()
        if self._store is None:
            raise RuntimeError(PROCESS_ENDED)
        return self._store


def _encodable(text: str) -> str:
    """The text without bytes that are none, which paths in messages may have."""
    return text.encode(errors="replace").decode()
