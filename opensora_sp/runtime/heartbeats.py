"""Heartbeats of all ranks, in a store that rank 0 hosts, with the stop request and the failure."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch.distributed as dist

from opensora_sp.common.error_file import wait_until
from opensora_sp.common.files import parse_json

from .bounded_store import BoundedStore
from .host_checks import rendezvous_address
from .processes import is_alive, machine_id

INTERVAL = 1.0  # seconds from one heartbeat to the next
PROCESS_ENDED = "its process has ended"
PROPAGATION_TIMEOUT = 5.0  # seconds for all ranks to learn of a failure
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports once per ``INTERVAL``.

    Attributes:
        number: heartbeats that the rank has written before.
        called: by process group, how many collectives the rank has called.
        returned: how many of these have returned to the host.
        location: the line of source that its main thread runs.
        has_left: whether the rank has left the run.
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
class _Process:
    """A rank, as the others know it."""

    machine: str
    pid: int


@dataclass(frozen=True)
class _Place:
    """Where rank 0 listens; or why it cannot."""

    address: str = ""
    port: int = 0
    error: str | None = None


class HeartbeatStore:
    """A ``TCPStore`` of rank 0, in addition to the store of the process group.

    All methods raise RuntimeError if the connection is lost, or if rank 0 does not answer in time.

    Attributes:
        peers: processes of the other ranks on this host, which can be watched directly.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.peers: dict[int, psutil.Process] = {}
        self._rank, self._world_size = rank, world_size
        self._server: dist.TCPStore | None = None  # in rank 0
        self._store: BoundedStore | None = None
        self._newest: dict[int, Heartbeat] = {}

    def open(self, timeout: float, answer_timeout: float) -> None:
        """Rank 0 hosts the store, all others connect to it. Collective.

        Args:
            timeout: seconds to connect.
            answer_timeout: seconds after which a store that does not answer is lost.

        Raises:
            ValueError: on all ranks, if rank 0 cannot listen or another rank not connect.
        """
        self._find_peers()
        place = _broadcast(self._host(timeout) if self._rank == 0 else None)
        _raise_first(place.error)

        error = None
        try:
            self._connect(place, timeout, answer_timeout)
        except RuntimeError as lost:
            error = (
                f"got no connection from rank {self._rank} on {socket.gethostname()} to rank 0 at "
                f"{place.address}:{place.port} ({first_line(lost)}); expected the ranks to reach "
                "each other at all ports; check the firewalls between the hosts"
            )
        _raise_first(*_gather(error))

    def _find_peers(self) -> None:
        machine = machine_id()
        for rank, process in enumerate(_gather(_Process(machine, os.getpid()))):
            if rank != self._rank and process.machine == machine:
                with suppress(psutil.NoSuchProcess):  # the lost connection will be reported
                    self.peers[rank] = psutil.Process(process.pid)

    def _host(self, timeout: float) -> _Place:
        """Rank 0: listen at a free port."""
        is_one_host = len(self.peers) == self._world_size - 1
        address = os.environ.get("MASTER_ADDR", "")
        try:
            address = LOOPBACK if is_one_host else rendezvous_address()
            limit = timedelta(seconds=timeout)
            self._server = dist.TCPStore(address, 0, None, True, limit, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            return _Place(
                error=f"got {address or 'no MASTER_ADDR'} to listen on for the other ranks, which "
                f"{socket.gethostname()} cannot ({first_line(error)}); expected an address of the "
                "first host, where rank 0 runs; set MASTER_ADDR to it"
            )

        self._server.set("failure", "")
        self._server.set("stop", "")
        return _Place(address, self._server.port)

    def _connect(self, place: _Place, timeout: float, answer_timeout: float) -> None:
        if self._server is not None:
            self._store = BoundedStore(self._server, answer_timeout)
        else:
            client = partial(
                dist.TCPStore,
                place.address,
                place.port,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
            self._store = BoundedStore.connect(client, timeout)
            self._store.timeout = answer_timeout

    def close(self) -> None:
        self._server = self._store = None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def write(self, heartbeat: Heartbeat) -> None:
        self._connected().set(f"heartbeat {self._rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: list[int]) -> dict[int, Heartbeat]:
        """The newest heartbeats of some ranks."""
        if not ranks:
            return {}

        texts = self._connected().multi_get([f"heartbeat {rank}" for rank in ranks])
        for rank, text in zip(ranks, texts):
            self._newest[rank] = Heartbeat(**parse_json(text, f"the heartbeat of rank {rank}"))
        return {rank: self._newest[rank] for rank in ranks}

    def last_location(self, rank: int) -> str:
        """Where a rank was by the newest heartbeat that was read; asks nobody."""
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
            return str(self._connected().compare_set("failure", "", text).decode())
        except RuntimeError:
            return reason  # there is no store, or rank 0 has exited

    def wait_until_all_know(self, timeout: float = PROPAGATION_TIMEOUT) -> bool:
        """Acknowledge the failure; returns whether all living ranks did so in time."""
        with suppress(RuntimeError):  # no store, or rank 0 was faster
            store = self._connected()
            store.timeout = timeout
            store.set(f"acknowledged {self._rank}", "")

            gone = {rank for rank, process in self.peers.items() if not is_alive(process)}
            living = [rank for rank in range(self._world_size) if rank not in gone]
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


class PeerTimeout:
    """Finds ranks that have written no heartbeat for ``timeout`` seconds.

    Time is counted in this rank's own heartbeats, so a process that was suspended blames nobody
    when it resumes.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._newest: dict[int, Heartbeat] = {}
        self._seen_at: dict[int, int] = {}

    def check(self, number: int, heartbeats: dict[int, Heartbeat]) -> str | None:
        """Report a silent rank; called at each heartbeat of this rank, which has a ``number``."""
        for rank, heartbeat in heartbeats.items():
            if heartbeat != self._newest.get(rank):
                self._newest[rank], self._seen_at[rank] = heartbeat, number

            silent = (number - self._seen_at[rank]) * INTERVAL
            if silent >= self._timeout and not heartbeat.has_left:
                return (
                    f"rank {rank} has sent no heartbeat for {silent:g} s (peer_timeout); "
                    f"it was at {heartbeat.location}"
                )
        return None


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _gather(value: Any) -> list[Any]:
    """The values of all ranks, on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_first(*errors: str | None) -> None:
    for error in errors:
        if error is not None:
            raise ValueError(error)


def _encodable(text: str) -> str:
    """The text without bytes that are none, which paths in messages may have."""
    return text.encode(errors="replace").decode()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type; torch adds stacks of C++."""
    return (str(error) or type(error).__name__).splitlines()[0]
