"""This host, or all hosts of a launcher: examined, and tried with a collective."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from opensora_sp.common.importing import check_colossalai
from opensora_sp.parallel import closing_process_group
from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.host_checks import check_devices, interfaces, shared_memory
from opensora_sp.runtime.local_ranks import LocalRanks
from opensora_sp.runtime.rank_info import PACKAGE, PACKAGES, versions
from opensora_sp.runtime.rendezvous import (
    JOIN_TIMEOUT,
    join_rendezvous,
    raise_on_all_ranks,
    start_process_group,
)
from opensora_sp.runtime.watchdog import Watchdog

GB = 1e9
MIN_SHARED_MEMORY = 1 * GB
TIMEOUT = 40.0  # seconds, of the rendezvous and of each collective
NUM_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # float32 numbers that a rank sends
ROUND_TRIPS, TRANSFERS = 20, 5

# Variables that decide how ranks start. No secrets: they are printed.
SHOWN = re.compile(r"(NCCL|GLOO|CUDA|OMP|TORCH|OPENSORA_SP)_\w+")


@dataclass(frozen=True)
class Check:
    """One line of a report: what was checked, the facts, the verdict, and what to do."""

    name: str
    result: str
    status: Literal["ok", "warn", "FAIL"] = "ok"
    advice: str = ""

    @classmethod
    def failed(cls, name: str, message: str) -> Check:
        """A failed check, of a message "got ...; expected ...; what to do"."""
        facts, _, advice = message.partition("; ")
        return cls(name, facts.removeprefix("got "), "FAIL", advice)

    @classmethod
    def warn_if(cls, problem: bool, name: str, facts: str, advice: str) -> Check:
        """A warning with advice where there is a problem."""
        return cls(name, facts, "warn", advice) if problem else cls(name, facts)

    @classmethod
    def run(cls, name: str, facts: str, check: Callable[[], None]) -> Check:
        """The result of a check that a run makes as well: the facts, or its error."""
        try:
            check()
        except ValueError as error:
            return cls.failed(name, str(error))
        return cls(name, facts)


@dataclass
class Report:
    """All checks of one host. ``facts`` must be equal on all hosts of a run."""

    host: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    gpus: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """Reports of all hosts, in the order of their ranks, and the check of a collective."""

    reports: list[Report]
    collective: Check | None = None

    @property
    def checks(self) -> list[Check]:
        """All checks, of all hosts."""
        checks = list(chain.from_iterable(report.checks for report in self.reports))
        return checks if self.collective is None else [*checks, self.collective]

    @property
    def ok(self) -> bool:
        return all(check.status != "FAIL" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The first host's report, with the reports of all others under ``hosts``."""
        first, *others = (asdict(report) for report in self.reports)
        collective = self.collective and asdict(self.collective)
        return {**first, "hosts": others, "collective": collective, "ok": self.ok}


def diagnose(*, collective: bool) -> Diagnosis | None:
    """Diagnose this host, or with the ranks of a launcher all of their hosts.

    Args:
        collective: start ranks on this host, where no launcher has started any.

    Returns:
        None on all ranks of a launcher but the first.

    Raises:
        ValueError: on every rank of a launcher, if these cannot start together.
    """
    launch = Launch.read()
    if launch is not None:
        return _diagnose_all_hosts(launch)
    report = examine()
    return Diagnosis([report], _try_collective(report.gpus or 2) if collective else None)


def _diagnose_all_hosts(launch: Launch) -> Diagnosis | None:
    report = examine() if launch.local_rank == 0 else None
    measured, gathered = measure_with_all_ranks(report)
    if launch.rank:
        return None
    return Diagnosis([report for report in gathered if report], _describe(measured))


def _try_collective(nproc: int) -> Check:
    """Start ranks on this host; returns what they measured, or why they could not."""
    folder = Path(tempfile.mkdtemp(prefix="opensora-sp-doctor-"))
    with closing(LocalRanks(nproc, measure_once, folder / "ranks.log")) as ranks:
        try:
            _, measured = ranks.run("measure", on_step=print, is_cancelled=lambda: False)
        except ValueError as error:
            # The message names the log, which is kept.
            return Check.failed("all ranks", str(error))
    shutil.rmtree(folder)
    return _describe(measured)


def _describe(measured: dict[str, Any]) -> Check:
    milliseconds = measured["round_trip"] * 1e3
    text = f"{measured['ranks']} ranks, {measured['backend']}: round trip {milliseconds:.2f} ms"
    if measured["ranks"] > 1:
        text += (
            f", all_to_all sends {measured['rate'] / 1e9:.2f} GB/s from each rank "
            f"({measured['bytes'] / 1e6:.0f} MB)"
        )
    return Check("all ranks", text)


def examine() -> Report:
    """Run all checks of this host."""
    facts = versions()
    checks = [*_software(facts), *_devices(), _shared_memory()]

    names = [f"{name} {addresses[0]}" for name, addresses in interfaces().items() if addresses]
    checks.append(Check("network", ", ".join(names)))

    checks.append(_environment())
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Report(socket.gethostname(), checks, facts, gpus)


def _software(facts: dict[str, str]) -> list[Check]:
    colossalai = Check.run("ColossalAI", facts["colossalai"], check_colossalai)
    if colossalai.status == "FAIL":
        advice = f"sampling needs none; for training {colossalai.advice}"
        colossalai = replace(colossalai, status="warn", advice=advice)

    others = sorted(set(PACKAGES) - {"colossalai"})
    python = f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    return [
        Check("opensora-sp", f"{facts['opensora-sp']} in {PACKAGE}"),
        Check("python", python),
        Check("torch", f"{facts['torch']}, built for CUDA {facts['CUDA of torch']}{_driver()}"),
        colossalai,
        Check("packages", ", ".join(f"{name} {facts[name]}" for name in others)),
    ]


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
    return f", NCCL {nccl}" + (f", driver {driver[0]}" if driver else "")


def _devices() -> list[Check]:
    if not torch.cuda.is_available():
        return [Check.run("devices", f"no GPU: {os.cpu_count()} CPU cores, gloo", check_devices)]
    return [_gpu(number) for number in range(torch.cuda.device_count())]


def _gpu(number: int) -> Check:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    facts = (
        f"{properties.name}, {free / GB:.1f} GB free of {total / GB:.1f}, compute "
        f"{properties.major}.{properties.minor}"
    )
    advice = "another process uses it: see nvidia-smi"
    return Check.warn_if(free < 0.9 * total, f"GPU {number}", facts, advice)


def _shared_memory() -> Check:
    total, free = shared_memory() or (0, 0)
    facts = f"{free / GB:.2f} GB free of {total / GB:.2f} in /dev/shm"
    advice = "docker run --shm-size=8g, or num_workers=0; NCCL needs some as well"
    return Check.warn_if(free < MIN_SHARED_MEMORY, "shared memory", facts, advice)


def _environment() -> Check:
    shown = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if SHOWN.fullmatch(name)]
    return Check("environment", ", ".join(shown) or "nothing set")


# On every rank: latency and bandwidth of collectives, checked


def measure_once(pipe: Connection) -> None:
    """As one of ``LocalRanks``: rank 0 answers with ("measured", what ``measure`` returns)."""
    pipe.recv()
    measured, _ = measure_with_all_ranks(None)
    if os.environ["RANK"] == "0":
        pipe.send(("measured", measured))
    with suppress(EOFError):
        pipe.recv()


def measure_with_all_ranks(report: Any) -> tuple[dict[str, Any], list[Any]]:
    """Join the other ranks; returns what they ``measure`` and the reports of all. Collective.

    Raises:
        ValueError: on every rank, if the ranks cannot start together.
    """
    os.environ.setdefault(JOIN_TIMEOUT, str(TIMEOUT))
    with raise_on_all_ranks():
        pass
    store = join_rendezvous()
    with closing_process_group(), Watchdog(store, peer_timeout=TIMEOUT, grace_time=0):
        device = start_process_group(store, timeout=timedelta(seconds=TIMEOUT), alone=True)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return measure(device), reports


def measure(device: torch.device) -> dict[str, Any]:
    """Latency of an all-reduce and bandwidth of an all-to-all, of the slowest rank. Collective.

    Returns:
        Seconds of the ``round_trip``; ``rate`` in bytes per second from each rank to all others,
        and the ``bytes`` of one transfer; ``ranks`` and ``backend``.

    Raises:
        ValueError: if other numbers arrive than were sent.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    backend = dist.get_backend()
    flag = torch.ones(1, device=device)
    round_trip = _slowest_seconds(lambda: dist.all_reduce(flag.fill_(1.0)), ROUND_TRIPS, device)

    # Rank r sends 1000 r + q to rank q.
    part = NUM_ELEMENTS[device.type] // ranks
    numbers = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(part)
    sent, expected = 1000 * rank + numbers, 1000 * numbers + rank
    received = torch.empty_like(sent)
    transfer = _slowest_seconds(lambda: dist.all_to_all_single(received, sent), TRANSFERS, device)

    if flag.item() != ranks or not torch.equal(received, expected):
        raise ValueError(
            f"got other numbers on rank {rank} than were sent; expected the same; the network or "
            "its driver is broken: try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1"
        )

    num_bytes = sent.element_size() * part * (ranks - 1)
    return {
        "ranks": ranks,
        "backend": backend,
        "round_trip": round_trip,
        "bytes": num_bytes,
        "rate": num_bytes / transfer,
    }


def _slowest_seconds(collective: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of a collective on the slowest rank."""
    seconds = median_seconds(collective, repeats, device)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def median_seconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of some runs, after two runs of warm-up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])
