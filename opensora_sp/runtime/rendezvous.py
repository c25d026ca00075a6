"""The rendezvous: all ranks join at the launcher's store before they make a process group.

Every rank reports what it runs and whether it can start. Rank 0 compares the reports, and all ranks
read one verdict. A process group by itself would wait for ranks that never join, and would not
notice ranks that run other code. After that all ranks connect to the store of the run.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.common.error_file import wait_until
from opensora_sp.common.files import parse_json

from .environment import Launch
from .host_checks import check_devices, check_machine, rendezvous_address, use_device
from .processes import machine_id
from .rank_info import (
    RANKS_OF_HOST,
    UNSET,
    RankInfo,
    device_kind,
    find_conflict,
    find_differences,
    format_ranks,
    versions,
)
from .run_store import BoundedStore, Place, RunStore
from .timeouts import backend_timeout

JOIN_TIMEOUT = "OPENSORA_SP_JOIN_TIMEOUT"  # seconds to wait for all ranks
DEFAULT_JOIN_TIMEOUT = 600.0
DEFAULT_TIMEOUT = backend_timeout()  # of collectives

# Names in the store. Ranks that run other versions of the code read the first three as well.
COUNTER, REPORT, VERDICT, CONNECTED = "arrived", "arrival {}", "verdict", "connected {}"

ERROR_TIMEOUT = 20.0  # seconds that a rank which cannot start takes at most to report that
CONNECT_TIMEOUT = 60.0  # seconds to connect to the store of the run
EXIT_TIMEOUT = 3.0  # seconds that a rank waits for all others to read a verdict not to start
LOOPBACK = "127.0.0.1"


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Check environment and host, then run the body; an exception is raised on all other ranks too.

    They receive it in ``join_rendezvous``, which every rank has to call afterwards, outside of the
    body.

    Raises:
        ValueError: if environment or host are not what this rank needs; and whatever the body
            raises.
    """
    if dist.is_initialized():
        yield
        return
    launch = Launch.read()
    if launch is None:
        check_devices()
        yield
        return

    try:
        check_machine(launch)
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

        # Whether or not the others learn of it, this rank raises its own error.
        if launch.world_size > 1:
            with suppress(ValueError):
                Rendezvous(launch, min(ERROR_TIMEOUT, join_timeout())).join({}, error=reason)
        raise


def join_rendezvous(settings: Mapping[str, Any] | None = None) -> RunStore | None:
    """Wait until all ranks have joined; returns the store of the run, for its ``Watchdog``.

    None for a single process. Ranks that have a process group already meet in its store.

    Args:
        settings: names and JSON values that must be equal on all ranks, such as a config's; not
            compared where there is a process group.

    Raises:
        ValueError: the same on every rank that can be reached, if a rank is missing or cannot
            start, if world sizes, versions, devices or settings differ, or if a rank cannot connect
            to rank 0.
    """
    store = None
    if dist.is_initialized():
        launch: Launch | None = Launch.of_process_group()
        store, settings = dist.distributed_c10d._get_default_store(), None
    else:
        launch = Launch.read()
    if launch is None or launch.world_size == 1:
        return None
    return Rendezvous(launch, join_timeout(), store).join(settings or {})


def start_process_group(
    store: RunStore | None, *, timeout: timedelta | None = DEFAULT_TIMEOUT, alone: bool = False
) -> torch.device:
    """Make the default process group and connect its ranks; returns this rank's device.

    Collective; does nothing where there is a group already. The backend is NCCL on CUDA, gloo on
    CPU.

    Args:
        store: what ``join_rendezvous`` returned; None for a single process.
        timeout: of collectives; None takes the backend's.
        alone: make a group for a single process as well.
    """
    device, backend = use_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return device
    if store is None:
        if alone:
            # Its collectives return what they get.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return device

    # The names of this store belong to one attempt: ranks that a launcher has started again must
    # not read the addresses of the attempt before.
    group_store = dist.PrefixStore("process group", store.launch_store)
    dist.init_process_group(
        backend, store=group_store, rank=store.rank, world_size=store.world_size, timeout=timeout
    )
    # NCCL connects in its first collective. A barrier would guess the devices of its ranks.
    dist.all_reduce(torch.zeros(1, device=device))
    return device


def join_timeout() -> float:
    """Seconds to wait for the other ranks."""
    text = os.environ.get(JOIN_TIMEOUT, str(DEFAULT_JOIN_TIMEOUT))
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < float("inf"):
            return seconds
    raise ValueError(
        f"got {JOIN_TIMEOUT}={text!r} in the environment; expected seconds, such as 600; correct it"
    )


class Rendezvous:
    """One rendezvous of all ranks at the store of the launch; all ranks join each in one order.

    Args:
        timeout: seconds to wait for all ranks.
        server: the store; None opens the launch's.
    """

    def __init__(self, launch: Launch, timeout: float, server: dist.Store | None = None) -> None:
        self.launch, self.timeout = launch, timeout
        self.host = socket.gethostname()
        self.deadline = time.monotonic() + timeout
        server = server or _open_store(launch, timeout)

        # The store of torchrun outlives the ranks, so each attempt has other names.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        names = dist.PrefixStore(f"opensora_sp/{attempt}", server)
        key = f"rendezvous of process {os.getpid()} of {self.host}"
        with reporting_lost_store(launch):
            number = BoundedStore(names, max(1.0, self._remaining())).add(key, 1)
        self.store = BoundedStore(dist.PrefixStore(str(number), names), timeout)
        # In rank 0, once all have joined.
        self.hosted: RunStore | None = None

    def join(self, settings: Mapping[str, Any], error: str | None = None) -> RunStore:
        """Report what this rank runs, wait for the verdict, and connect to the store of the run.

        Raises:
            ValueError: if the ranks cannot start, or a store is lost.
        """
        launch = self.launch
        software = {**versions(), "device": device_kind()}
        # Which groups lie on one node follows from it, and by that how ranks share a batch.
        ranks_of_host = "set" if RANKS_OF_HOST in os.environ else UNSET
        info = RankInfo(
            launch.rank,
            launch.world_size,
            self.host,
            software,
            {RANKS_OF_HOST: ranks_of_host, **settings},
            error,
            process=(machine_id(), os.getpid()),
        )

        with reporting_lost_store(launch):
            number = self.store.add(COUNTER, 1)
            # A run that was started with the port of another one.
            if number > launch.world_size:
                raise ValueError(self._foreign(number))
            self.store.set(REPORT.format(number), json.dumps(asdict(info)))

            reason, place = self._judge() if launch.rank == 0 else self._read_verdict()
            store: RunStore | None = None
            if place is not None:
                store, reason = self.connect(place)
            if reason:
                self._wait_until_all_know()
        if store is None or reason:
            raise ValueError(reason)
        return store

    def _judge(self) -> tuple[str, Place | None]:
        """Rank 0: compare the ranks as they join; set and return the verdict.

        That is the reason not to start, empty if all ranks can; then where the store of the run is.
        """
        joined: list[RankInfo] = []
        error = None
        while error is None and len(joined) < self.launch.world_size:
            info = self._next_rank(joined)
            if info is None:
                present = {rank.rank for rank in joined}
                absent = [rank for rank in range(self.launch.world_size) if rank not in present]
                error = self._missing(absent, {rank.host for rank in joined})
            else:
                joined.append(info)
                error = find_conflict(joined)

        error = error or find_differences(joined)
        place = None if error else self._host_store(joined)
        self.store.set(VERDICT, json.dumps([error, place and asdict(place)]))
        return error, place

    def _host_store(self, joined: list[RankInfo]) -> Place:
        """Host the store of the run."""
        processes = [info.process for info in sorted(joined, key=lambda info: info.rank)]
        # On one host the port is not open to the network.
        is_one_host = len({machine for machine, _ in processes}) == 1
        address = LOOPBACK if is_one_host else rendezvous_address()
        self.hosted = RunStore.host(address, processes, self.store.store)
        return self.hosted.place

    def connect(self, place: Place) -> tuple[RunStore, str]:
        """Connect to the store of the run, and wait until all ranks have.

        Returns:
            The store, and the first reason why a rank could not connect, empty if all did.
        """
        rank, error = self.launch.rank, ""
        store = self.hosted or RunStore(rank, place, self.store.store)
        try:
            # The others still wait when this rank reports that it cannot.
            if not store.is_open:
                store.connect(max(1.0, min(CONNECT_TIMEOUT, self._remaining() / 2)))
        except RuntimeError as lost:
            error = (
                f"got no connection from rank {rank} on {self.host} to rank 0 at "
                f"{place.address}:{place.port} ({first_line(lost)}); expected the ranks to reach "
                "each other at all ports; check the firewalls between the hosts"
            )

        self.store.set(CONNECTED.format(rank), error)
        keys = [CONNECTED.format(other) for other in range(self.launch.world_size)]
        if not self._wait_for(keys, self._remaining()):
            absent = [other for other, key in enumerate(keys) if not self.store.check([key])]
            return store, self._missing(absent, {self.host})
        errors = [text.decode() for text in self.store.multi_get(keys)]
        return store, next(filter(None, errors), "")

    def _next_rank(self, joined: list[RankInfo]) -> RankInfo | None:
        """The next rank that joins; None if no other joins in time."""
        key = REPORT.format(len(joined) + 1)
        if not self._wait_for([key], self._remaining()):
            return None
        return RankInfo.parse(self.store.get(key))

    def _read_verdict(self) -> tuple[str, Place | None]:
        # Rank 0 has the same deadline, and its verdict names the missing ranks.
        if self._wait_for([VERDICT], self._remaining() + 1):
            error, place = parse_json(self.store.get(VERDICT), "the verdict of rank 0")
            return error, place and Place(**place)
        error = (
            f"got no response from rank 0 at {_address(self.launch)} within {self.timeout:.0f} s; "
            "expected it to start; look at its output on the first host"
        )
        return error, None

    def _wait_for(self, keys: list[str], timeout: float) -> bool:
        self.store.timeout = max(1.0, self._remaining())
        return wait_until(lambda: bool(self.store.check(keys)), timeout)

    def _remaining(self) -> float:
        return self.deadline - time.monotonic()

    def _wait_until_all_know(self) -> None:
        """A rank that exits may end the store, or let torchrun end the other ranks of its host."""
        self.store.add("know", 1)
        # Other ranks end nobody else when they exit, so they need not wait.
        if self.launch.agent_store or self.launch.hosts_store:
            world_size = self.launch.world_size
            wait_until(lambda: self.store.add("know", 0) >= world_size, EXIT_TIMEOUT)

    def _foreign(self, number: int) -> str:
        return (
            f"got rank {self.launch.rank} ({self.host}) as number {number} of "
            f"{self.launch.world_size} ranks at {_address(self.launch)}; expected the store of "
            "this run, but the ranks of another have joined there; end that run, or pass another "
            "--master_port"
        )

    def _missing(self, absent: list[int], hosts: set[str]) -> str:
        world_size = self.launch.world_size
        return (
            f"got {world_size - len(absent)} of {world_size} ranks within {self.timeout:.0f} s, "
            f"from {', '.join(sorted(hosts))}; expected all, but {format_ranks(absent)} did not "
            "join; look at the output of the other hosts, start them, or give slow ones more time "
            f"with {JOIN_TIMEOUT}=SECONDS"
        )


def _open_store(launch: Launch, timeout: float) -> dist.Store:
    """The store at the launch's address: of torchrun, or hosted by rank 0 as ``env://`` would."""
    host, port = launch.master
    connect = partial(
        dist.TCPStore,
        host,
        port,
        launch.world_size,
        is_master=launch.hosts_store,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        # So that init_process_group in this process finds the same one.
        multi_tenant=True,
    )
    try:
        opened: dist.Store = BoundedStore.connect(connect, timeout).store
        return opened
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"got no connection from {socket.gethostname()} to rank 0 at {_address(launch)} within "
            f"{timeout:.0f} s ({first_line(error)}); expected rank 0 to listen there; check that "
            "it was started, that MASTER_ADDR and MASTER_PORT are the same on all hosts, that no "
            "other program uses the port, and that no firewall is between them"
        ) from None


@contextmanager
def reporting_lost_store(launch: Launch) -> Iterator[None]:
    """Turn the error of a store that is lost, or does not answer, into one for users."""
    try:
        yield
    except RuntimeError as lost:
        raise ValueError(
            f"got no response from the store at {_address(launch)} on {socket.gethostname()} "
            f"({first_line(lost)}); expected the first host to keep running until all ranks have "
            "joined; look at its output"
        ) from None


def _address(launch: Launch) -> str:
    return ":".join(map(str, launch.master))


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type; torch adds stacks of C++."""
    return (str(error) or type(error).__name__).splitlines()[0]
