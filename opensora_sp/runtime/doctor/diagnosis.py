"""This host, or all hosts of a launcher: examined, and tried with a collective."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.local_ranks import LocalRanks

from .host_report import Check, Report, examine
from .probe import measure_once, measure_with_all_ranks

PROBE_TIMEOUT = 100  # seconds


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


def diagnose(port: int, *, collective: bool, trains: bool) -> Diagnosis | None:
    """Diagnose this host, or with the ranks of a launcher all of their hosts.

    Args:
        port: at which rank 0 of a run would listen.
        collective: start ranks on this host, where no launcher has started any.
        trains: a training is to run.

    Returns:
        None on all ranks of a launcher but the first.

    Raises:
        ValueError: on every rank of a launcher, if these cannot start together.
    """
    launch = Launch.read()
    if launch is not None:
        return _diagnose_all_hosts(launch, trains=trains)
    report = examine(trains=trains, port=port)
    return Diagnosis([report], _try_collective(report.gpus or 2) if collective else None)


def _diagnose_all_hosts(launch: Launch, *, trains: bool) -> Diagnosis | None:
    master = launch.master[0] if launch.spans_hosts else None
    report = examine(trains=trains, master=master) if launch.local_rank == 0 else None
    measured, gathered = measure_with_all_ranks(report)
    if launch.rank:
        return None
    return Diagnosis([report for report in gathered if report], _describe(measured))


def _try_collective(nproc: int) -> Check:
    """Start ranks on this host; returns what they measured, or why they could not."""
    folder = Path(tempfile.mkdtemp(prefix="opensora-sp-doctor-"))
    with closing(LocalRanks(nproc, measure_once, folder / "ranks.log")) as ranks:
        is_late = threading.Event()

        def end_late_ranks() -> None:
            is_late.set()
            ranks.close()

        timer = threading.Timer(PROBE_TIMEOUT, end_late_ranks)
        timer.start()
        try:
            _, measured = ranks.run("measure", on_step=print, is_cancelled=lambda: False)
        except ValueError as error:
            # The message names the log, which is kept.
            message = str(error)
            if is_late.is_set():
                load, cores = os.getloadavg()[0], os.cpu_count()
                message = (
                    f"got no result within {PROBE_TIMEOUT:g} s, at a load of {load:.0f} on {cores} "
                    f"cores; expected one; try again on an idle host, or look at why a rank hangs "
                    f"({error})"
                )
            return Check.failed("all ranks", message)
        finally:
            timer.cancel()
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
