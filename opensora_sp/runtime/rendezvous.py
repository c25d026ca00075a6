"""The rendezvous: all ranks join at a store before they join a process group, or none starts.

Every rank reports what it runs and whether it can start. Rank 0 compares the reports, and all ranks
read one verdict. A process group by itself would wait for ranks that never join, and would not
notice ranks that run other code.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from opensora_sp.common.error_file import wait_until
from opensora_sp.common.files import parse_json

from .bounded_store import BoundedStore
from .environment import Launch
from .host_checks import check_devices, check_machine
from .rank_info import (
    RANKS_OF_HOST,
    UNSET,
    RankInfo,
    find_conflict,
    find_differences,
    format_ranks,
)
from .versions import device_kind, versions

logger = logging.getLogger(__name__)
JOIN_TIMEOUT = "OPENSORA_SP_JOIN_TIMEOUT"  # seconds to wait for all ranks
DEFAULT_JOIN_TIMEOUT = 600.0

# Names in the store. Ranks that run other versions of the code read them too: they must not change.
COUNTER, REPORT, VERDICT = "arrived", "arrival {}", "verdict"

REMINDER_INTERVAL = 30.0  # seconds between two log lines about missing ranks
ERROR_TIMEOUT = 20.0  # seconds that a rank which cannot start takes at most to report that
EXIT_TIMEOUT = 3.0  # seconds that a rank waits for all others to read a verdict not to start


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


def join_rendezvous(settings: Mapping[str, Any] | None = None) -> BoundedStore | None:
    """Wait until all ranks have joined; returns the store, to keep until they have joined a group.

    Does nothing and returns None for a single process, or where a process group exists already.

    Args:
        settings: names and JSON values that must be equal on all ranks, such as those of a config.

    Raises:
        ValueError: the same on every rank that can be reached, if a rank is missing or cannot
            start, or if world sizes, versions, devices or settings differ.
    """
    launch = None if dist.is_initialized() else Launch.read()
    if launch is None or launch.world_size == 1:
        return None

    rendezvous = Rendezvous(launch, join_timeout())
    rendezvous.join(settings or {})
    return rendezvous.store


def join_timeout() -> float:
    """Seconds to wait for the other ranks."""
    value = os.environ.get(JOIN_TIMEOUT, str(DEFAULT_JOIN_TIMEOUT))
    with suppress(ValueError):
        seconds = float(value)
        if 0 < seconds < float("inf"):
            return seconds
    raise ValueError(
        f"got {JOIN_TIMEOUT}={value!r} in the environment; expected seconds, such as 600; correct "
        "it"
    )


class Rendezvous:
    """One rendezvous of all ranks at the store of the launch; all ranks join each in one order."""

    def __init__(self, launch: Launch, timeout: float) -> None:
        self.launch, self.timeout = launch, timeout
        self.host = socket.gethostname()
        self.deadline = time.monotonic() + timeout
        self.next_reminder = time.monotonic() + REMINDER_INTERVAL
        server = _open_store(launch, timeout)

        # The store of torchrun outlives the ranks, so each attempt has keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        names = dist.PrefixStore(f"opensora_sp/{attempt}", server)
        key = f"rendezvous of process {os.getpid()} of {self.host}"
        with reporting_lost_store(launch):
            number = BoundedStore(names, max(1.0, self._remaining())).add(key, 1)
        self.store = BoundedStore(dist.PrefixStore(str(number), names), timeout)

    def join(self, settings: Mapping[str, Any], error: str | None = None) -> None:
        """Report what this rank runs, and wait for the verdict.

        Raises:
            ValueError: if the ranks cannot start, or the store is lost.
        """
        launch = self.launch
        software = {**versions(), "device": device_kind()}
        # Which groups lie on one node follows from it, and by that how ranks share a batch.
        of_host = "set" if RANKS_OF_HOST in os.environ else UNSET
        settings = {RANKS_OF_HOST: of_host, **settings}
        info = RankInfo(launch.rank, launch.world_size, self.host, software, settings, error)

        with reporting_lost_store(launch):
            number = self.store.add(COUNTER, 1)
            if number > launch.world_size:
                raise ValueError(self._foreign(number))
            self.store.set(REPORT.format(number), json.dumps(asdict(info)))
            verdict = self._judge() if launch.rank == 0 else self._read_verdict()
            if verdict:
                self._wait_until_all_know()
        if verdict:
            raise ValueError(verdict)

    def _judge(self) -> str:
        """Compare the ranks as they join; set and return the reason not to start, empty if none."""
        joined: list[RankInfo] = []
        verdict = None
        while verdict is None and len(joined) < self.launch.world_size:
            info = self._next_rank(joined)
            if info is None:
                verdict = self._missing(joined)
            else:
                joined.append(info)
                verdict = find_conflict(joined)

        verdict = verdict or find_differences(joined)
        self.store.set(VERDICT, verdict)
        return verdict

    def _next_rank(self, joined: list[RankInfo]) -> RankInfo | None:
        """The next rank that joins; None if no other joins in time."""
        key = REPORT.format(len(joined) + 1)
        while not self._wait_for(key, min(self.next_reminder, self.deadline) - time.monotonic()):
            if self._remaining() <= 0:
                return None
            logger.warning("waiting for %s to join", format_ranks(self._absent(joined)))
            self.next_reminder += REMINDER_INTERVAL
        return RankInfo(**parse_json(self.store.get(key), "the report of a rank"))

    def _read_verdict(self) -> str:
        # Rank 0 has the same deadline, and its verdict names the missing ranks.
        if self._wait_for(VERDICT, self._remaining() + 1):
            return str(self.store.get(VERDICT).decode())
        return (
            f"got no response from rank 0 at {_address(self.launch)} within {self.timeout:.0f} s; "
            "expected it to start; look at its output on the first host"
        )

    def _wait_for(self, key: str, timeout: float) -> bool:
        self.store.timeout = max(1.0, self._remaining())
        return wait_until(lambda: bool(self.store.check([key])), timeout)

    def _remaining(self) -> float:
        return self.deadline - time.monotonic()

    def _wait_until_all_know(self) -> None:
        """A rank that exits may end the store, or let torchrun end the other ranks of its host."""
        self.store.add("know", 1)
        if self.launch.agent_store or self.launch.hosts_store:
            world_size = self.launch.world_size
            wait_until(lambda: self.store.add("know", 0) >= world_size, EXIT_TIMEOUT)

    def _absent(self, joined: list[RankInfo]) -> list[int]:
        return sorted(set(range(self.launch.world_size)) - {one.rank for one in joined})

    def _foreign(self, number: int) -> str:
        return (
            f"got rank {self.launch.rank} ({self.host}) as number {number} of "
            f"{self.launch.world_size} ranks at {_address(self.launch)}; expected the store of "
            "this run, but the ranks of another have joined there; end that run, or pass another "
            "--master_port"
        )

    def _missing(self, joined: list[RankInfo]) -> str:
        hosts = ", ".join(sorted({one.host for one in joined}))
        return (
            f"got {len(joined)} of {self.launch.world_size} ranks within {self.timeout:.0f} s, "
            f"from {hosts}; expected all, but {format_ranks(self._absent(joined))} did not join; "
            "look at the output of the other hosts, start them, or give slow ones more time with "
            f"{JOIN_TIMEOUT}=SECONDS"
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
        multi_tenant=True,  # so that init_process_group in this process finds the same one
    )
    try:
        opened: dist.Store = BoundedStore.connect(connect, timeout).store
        return opened
    except (RuntimeError, ValueError) as error:
        if launch.hosts_store:
            raise ValueError(
                f"got {_address(launch)} to listen on, which {socket.gethostname()} cannot "
                f"({_reason(error)}); expected a free port and an address of this host, where rank "
                f"0 runs; pass another --master_port, or end what uses {port}"
            ) from None
        raise ValueError(
            f"got no connection from {socket.gethostname()} to rank 0 at {_address(launch)} within "
            f"{timeout:.0f} s ({_reason(error)}); expected rank 0 to listen there; check that it "
            "was started, that MASTER_ADDR and MASTER_PORT are the same on all hosts, that no "
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
            f"({_reason(lost)}); expected the first host to keep running until all ranks have "
            "joined; look at its output"
        ) from None


def _address(launch: Launch) -> str:
    return ":".join(map(str, launch.master))


def _reason(error: Exception) -> str:
    """The cause of an error of the store in few words."""
    known = {
        "EADDRINUSE": "address already in use",
        "already in use": "address already in use",
        "EADDRNOTAVAIL": "not an address of this host",
        "timed out": "timed out",
        "no answer": "it accepts connections and does not answer",
        "nonce": "it answers as another program does",
    }
    causes = [cause for text, cause in known.items() if text in str(error)]
    return causes[0] if causes else str(error).splitlines()[0][:200]
