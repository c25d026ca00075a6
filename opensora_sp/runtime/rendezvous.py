"""The ranks meet at a store before they join a process group, and start together or not at all.

Every rank says which it is, what it runs and whether it can start; rank 0 judges, and all read one verdict. A process
group by itself would wait for ranks that never come, and say nothing of ranks that run other code.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .environment import Launch
from .host_checks import check_devices, check_machine
from .versions import device_kind, versions

logger = logging.getLogger(__name__)
PATIENCE = "OPENSORA_SP_JOIN_TIMEOUT"  # seconds to wait for all ranks
DEFAULT_PATIENCE = 600.0
REMIND = 30.0  # seconds between two lines about who is missing
TELL = 20.0  # seconds that a rank which cannot start takes at most to tell the others so
STAY = 5.0  # seconds that a rank which will not start waits at most for all others to know why
POLL = 0.05
ABBREVIATED = 60  # characters of a value in a message


@dataclass(frozen=True)
class Arrival:
    """What a rank says when it comes. ``error`` is why it cannot start."""

    rank: int
    world_size: int
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


@contextmanager
def told_to_all_ranks() -> Iterator[None]:
    """Check this process's environment and machine, then run the body; if it raises, the other ranks raise that too.

    They learn it when they ``meet``, which every rank has to do afterwards, outside of the body.

    Raises:
        ValueError: if environment or machine are not what this rank needs; and whatever the body raises.
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
        if launch.world_size > 1:
            with suppress(
                ValueError
            ):  # this rank's own error is the one to see, told to others or not
                Meeting(launch, min(TELL, patience())).arrive({}, error=reason)
        raise


def meet(settings: Mapping[str, Any] | None = None) -> dist.Store | None:
    """Wait until all ranks have come; returns the store where they met, to keep until they have joined a group.

    Does nothing and returns None where this process is alone, or has joined a process group already.

    Args:
        settings: names and JSON values that must be the same on every rank, such as those of a config.

    Raises:
        ValueError: the same on every rank that can be reached, if one is missing or cannot start, or if world sizes,
            versions, devices or settings differ.
    """
    launch = None if dist.is_initialized() else Launch.read()
    if launch is None or launch.world_size == 1:
        return None
    meeting = Meeting(launch, patience())
    meeting.arrive(settings or {})
    return meeting.store


def patience() -> float:
    """Seconds to wait for the other ranks."""
    given = os.environ.get(PATIENCE, str(DEFAULT_PATIENCE))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"got {PATIENCE}={given!r} in the environment; expected seconds, such as 600; correct it"
        )
    return seconds


class Meeting:
    """One meeting of all ranks at the store of the launch. Ranks hold their meetings in the same order."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self.launch, self.seconds = launch, seconds
        self.host, self.deadline = socket.gethostname(), time.monotonic() + seconds
        server = _open_store(launch, seconds)
        attempt = os.environ.get(
            "TORCHELASTIC_RESTART_COUNT", "0"
        )  # torchrun's store outlives the ranks
        names = dist.PrefixStore(f"opensora_sp/{attempt}", server)
        number = names.add(f"meetings of process {os.getpid()} of {self.host}", 1)
        self.store: Any = dist.PrefixStore(str(number), names)  # torch's type stubs lack ``check``

    def arrive(self, settings: Mapping[str, Any], error: str | None = None) -> None:
        """Say what this rank runs, and wait for the verdict."""
        launch, store = self.launch, self.store
        here = Arrival(launch.rank, launch.world_size, self.host, error=error)
        if error is None:
            facts = {**versions(), "device": device_kind()}
            here = Arrival(launch.rank, launch.world_size, self.host, facts, settings)
        try:
            store.set(f"arrival {store.add('arrived', 1)}", json.dumps(asdict(here)))
            verdict = self._judge() if launch.rank == 0 else self._await_verdict()
            if verdict:
                self._stay_until_all_know()
        except RuntimeError as broken:
            raise ValueError(
                f"got no answer any more from {_where(launch)} on {self.host} ({_reason(broken)}); expected the first "
                "host to stay until all ranks have started; look at the output there"
            ) from None
        if verdict:
            raise ValueError(verdict)

    def _judge(self) -> str:
        """Look at the ranks as they come, and publish the first reason not to start, or that there is none."""
        arrivals: list[Arrival] = []
        verdict: str | None = None
        remind = time.monotonic() + REMIND
        while verdict is None:
            if self.store.check([f"arrival {len(arrivals) + 1}"]):
                arrivals.append(
                    Arrival(**json.loads(self.store.get(f"arrival {len(arrivals) + 1}")))
                )
                verdict = refusal(arrivals) or (
                    "" if len(arrivals) == self.launch.world_size else None
                )
            elif time.monotonic() > self.deadline:
                verdict = self._missing(arrivals)
            else:
                if time.monotonic() > remind:
                    remind += REMIND
                    logger.warning("waiting for %s", _ranks(self._absent(arrivals)))
                time.sleep(POLL)
        verdict = verdict or differences(sorted(arrivals, key=lambda one: one.rank))
        self.store.set("verdict", verdict)
        return verdict

    def _await_verdict(self) -> str:
        while not self.store.check(["verdict"]):
            if (
                time.monotonic() > self.deadline + POLL + 1
            ):  # rank 0 has the same patience, and knows more
                return (
                    f"got no word from rank 0 at {_where(self.launch)} within {self.seconds:.0f} s; "
                    "expected it to start; look at its output on the first host"
                )
            time.sleep(POLL)
        return self.store.get("verdict").decode()

    def _stay_until_all_know(self) -> None:
        """A rank that leaves may take the store along, or let torchrun end the other ranks of its host."""
        end = time.monotonic() + STAY
        known = self.store.add("know", 1)
        stays = self.launch.agent_store or self.launch.keeps_store
        while stays and known < self.launch.world_size and time.monotonic() < end:
            time.sleep(POLL)
            known = self.store.add("know", 0)

    def _absent(self, arrivals: list[Arrival]) -> list[int]:
        return sorted(set(range(self.launch.world_size)) - {one.rank for one in arrivals})

    def _missing(self, arrivals: list[Arrival]) -> str:
        hosts = sorted({one.host for one in arrivals})
        return (
            f"got {len(arrivals)} of {self.launch.world_size} ranks within {self.seconds:.0f} s, from "
            f"{', '.join(hosts)}; expected all, but {_ranks(self._absent(arrivals))} did not come; look at the output "
            f"of the other hosts, start them, or give slow ones more time with {PATIENCE}=SECONDS"
        )


def refusal(arrivals: list[Arrival]) -> str | None:
    """Why these ranks, the last of which has just come, will not start, however many more come."""
    first, last = arrivals[0], arrivals[-1]
    if last.error is not None:
        return f"{last.name} cannot start: {last.error}"
    if first.world_size != last.world_size:
        return (
            f"got WORLD_SIZE {first.world_size} on {first.name} and {last.world_size} on {last.name}; expected the "
            "same on every rank; start all hosts with the same --nnodes and --nproc_per_node"
        )
    for one in arrivals[:-1]:
        if one.rank == last.rank:
            return (
                f"got rank {last.rank} twice, on {one.host} and on {last.host}; expected every rank once; give each "
                "host its own --node_rank, and no other run the same --master_port"
            )
    return None


def differences(arrivals: list[Arrival]) -> str:
    """What the ranks do not share of what they must share; empty where that is nothing."""
    for kind, expected, advice in (
        (
            "versions",
            "the same software and kind of device",
            "install the same everywhere; see opensora-sp doctor",
        ),
        ("settings", "the same config", "give every host the same config file and --cfg-options"),
    ):
        told = []
        values = [getattr(one, kind) for one in arrivals]
        for name in sorted({name for one in values for name in one}):
            by_value: dict[str, list[int]] = {}
            for arrival, facts in zip(arrivals, values, strict=True):
                value = facts.get(name, "absent")
                by_value.setdefault(
                    value if isinstance(value, str) else json.dumps(value), []
                ).append(arrival.rank)
            if len(by_value) > 1:
                told.append(
                    f"{name} "
                    + ", ".join(f"{_short(v)} on {_at(arrivals, on)}" for v, on in by_value.items())
                )
        if told:
            return f"got different {kind}: {'; '.join(told)}; expected {expected} on every rank; {advice}"
    return ""


def _at(arrivals: list[Arrival], ranks: list[int]) -> str:
    hosts = sorted({one.host for one in arrivals if one.rank in ranks})
    return f"{_ranks(sorted(ranks))} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"


def _short(text: str) -> str:
    return text if len(text) <= ABBREVIATED else text[: ABBREVIATED - 3] + "..."


def _open_store(launch: Launch, seconds: float) -> dist.Store:
    """The store at the address of the launch: torchrun's, or one that rank 0 keeps, as ``env://`` would."""
    host, port = launch.master
    try:
        return dist.TCPStore(
            host,
            port,
            launch.world_size,
            is_master=launch.keeps_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,  # so that init_process_group in this process finds the same one
        )
    except (RuntimeError, ValueError) as error:
        if launch.keeps_store:
            raise ValueError(
                f"got {_where(launch)} to listen at, which {socket.gethostname()} cannot ({_reason(error)}); "
                f"expected a free port and an address of this host, where rank 0 runs; pass another "
                f"--master_port, or end what uses {port}"
            ) from None
        raise ValueError(
            f"got no connection from {socket.gethostname()} to rank 0 at {_where(launch)} within {seconds:.0f} s "
            f"({_reason(error)}); expected rank 0 to listen there; check that it was started, that MASTER_ADDR and "
            "MASTER_PORT are the same on all hosts, and that no firewall is between them"
        ) from None


def _where(launch: Launch) -> str:
    return ":".join(map(str, launch.master))


def _reason(error: Exception) -> str:
    for word, meaning in (
        ("EADDRINUSE", "address already in use"),
        ("already in use", "address already in use"),
        ("EADDRNOTAVAIL", "not an address of this host"),
        ("timed out", "timed out"),
    ):
        if word in str(error):
            return meaning
    return str(error).splitlines()[0][:200]
