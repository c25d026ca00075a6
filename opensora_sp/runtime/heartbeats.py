"""Heartbeats of all ranks, in a store that rank 0 hosts, with the stop request and the failure."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from opensora_sp.json_reader import parse_json
from opensora_sp.polling import wait_until

from .bounded_store import BoundedStore
from .processes import is_alive, machine_id

INTERVAL = 1.0  # seconds from one heartbeat to the next
PROCESS_ENDED = "its process has ended"
PROPAGATION_TIMEOUT = 5.0  # seconds for all ranks to learn of a failure


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports once per ``INTERVAL``.

    Attributes:
        number: heartbeats that the rank has written before.
        called: by process group, how many collectives the rank has called.
        returned: how many of these have returned to the host.
        location: the line of source that its main thread runs.
        has_left: whether the rank has left the run.
    """

    number: int
    called: dict[str, int]
    returned: dict[str, int]
    location: str
    has_left: bool


class HeartbeatStore:
    """A ``TCPStore`` beside that of the process group.

    All methods raise RuntimeError if the connection is lost, or if rank 0 does not answer in time.

    Attributes:
        peers: processes of the other ranks on this host, which can be watched directly.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.peers: dict[int, psutil.Process] = {}
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        self._acknowledged = False

    def open(self, timeout: float, answer_timeout: float) -> None:
        """Rank 0 hosts the store, all others connect to it. Collective.

        Args:
            timeout: seconds to connect.
            answer_timeout: seconds after which a store that does not answer is lost.
        """
        machine = machine_id()
        ranks: list[Any] = [None] * self._world_size
        dist.all_gather_object(ranks, (machine, os.getpid()))
        for rank, (host, pid) in enumerate(ranks):
            if rank != self._rank and host == machine:
                with suppress(psutil.NoSuchProcess):  # the lost connection will be reported
                    self.peers[rank] = psutil.Process(pid)

        is_one_host = len(self.peers) == self._world_size - 1
        address = "127.0.0.1" if is_one_host else os.environ.get("MASTER_ADDR", os.uname().nodename)
        options: dict[str, Any] = dict(timeout=timedelta(seconds=timeout), wait_for_workers=False)
        port = [0]
        if self._rank == 0:
            store = dist.TCPStore(address, 0, is_master=True, **options)
            store.set("failure", "")
            store.set("stop", "")
            port = [store.port]

        dist.broadcast_object_list(port, src=0)
        if self._rank:
            store = dist.TCPStore(address, port[0], is_master=False, **options)
        self._store = BoundedStore(store, answer_timeout)

    def close(self) -> None:
        self._store = None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def write(self, heartbeat: Heartbeat) -> None:
        self._connected().set(f"heartbeat {self._rank}", json.dumps(asdict(heartbeat)))

    def heartbeats(self, ranks: list[int]) -> dict[int, Heartbeat]:
        """The newest heartbeats of some ranks."""
        if not ranks:
            return {}
        values = self._connected().multi_get([f"heartbeat {rank}" for rank in ranks])
        return {
            rank: Heartbeat(**parse_json(value, f"the heartbeat of rank {rank}"))
            for rank, value in zip(ranks, values)
        }

    def failure(self) -> str:
        """The run's first failure; empty if there is none."""
        return str(self._connected().get("failure").decode())

    def stop_reason(self) -> str:
        """Why some rank requested to stop; empty if none did."""
        return str(self._connected().get("stop").decode())

    def request_stop(self, reason: str) -> None:
        self._connected().set("stop", reason)

    def claim_failure(self, reason: str) -> str:
        """Make this the run's failure unless it has one already; returns the run's failure."""
        try:
            return str(self._connected().compare_set("failure", "", reason).decode())
        except RuntimeError:
            return reason  # there is no store, or rank 0 has exited

    def wait_until_all_know(self) -> bool:
        """Acknowledge the failure; returns whether all living ranks did so in time."""
        with suppress(RuntimeError):  # no store, or rank 0 was faster
            store = self._connected()
            living = self._world_size - sum(not is_alive(one) for one in self.peers.values())
            if not self._acknowledged:
                self._acknowledged = True
                store.add("acknowledged", 1)
            return wait_until(lambda: store.add("acknowledged", 0) >= living, PROPAGATION_TIMEOUT)
        return False

    def _connected(self) -> Any:
        """The store, not tried after rank 0 has exited: torch would print a stack each time."""
        if 0 in self.peers and not is_alive(self.peers[0]):
            self._store = None
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
                return f"rank {rank} has sent no heartbeat for {silent:g} s (peer_timeout)"
        return None
