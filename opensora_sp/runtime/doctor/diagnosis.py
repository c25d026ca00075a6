"""This host, or all hosts of a launcher: examined, and tried with a collective."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, Popen, TimeoutExpired
from typing import Any

from opensora_sp.common.files import parse_json
from opensora_sp.runtime.environment import Launch

from .host_report import Check, Report, examine
from .probe import PREFIX, measure_with_all_ranks

PROBE_TIMEOUT = 100  # seconds
PROBE = ["-m", "opensora_sp.runtime.doctor.probe"]
ERRORS = re.compile(
    r"^error(?: \(rank \d+\))?: (.*)|^(?:\[rank\d+\]: )?(\w*(?:\.\w+)*Error: .*)", re.MULTILINE
)


@dataclass(frozen=True)
class Diagnosis:
    """Reports of all hosts, in the order of their ranks, and the check of a collective."""

    reports: list[Report]
    collective: Check | None = None

    @property
    def checks(self) -> list[Check]:
        """All checks, of all hosts."""
        checks = []
        for report in self.reports:
            checks += report.checks
        return checks if self.collective is None else [*checks, self.collective]

    @property
    def ok(self) -> bool:
        return all(check.status != "FAIL" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The first host's report, with those of all others under ``hosts``."""
        first, *others = (report.to_dict() for report in self.reports)
        collective = None if self.collective is None else vars(self.collective)
        return {**first, "hosts": others, "collective": collective, "ok": self.ok}


def diagnose(port: int, *, collective: bool) -> Diagnosis | None:
    """Diagnose this host, or with the ranks of a launcher all of their hosts.

    Args:
        port: at which rank 0 of a run would listen.
        collective: whether to start ranks on this host, where no launcher has started any.

    Returns:
        None on all ranks of a launcher but the first.

    Raises:
        ValueError: on every rank of a launcher, if these cannot start together.
    """
    launch = Launch.read()
    if launch is not None:
        return _diagnose_all_hosts(launch)

    report = examine(port=port)
    if not collective:
        return Diagnosis([report])
    options = ["--standalone", "--nproc_per_node", str(report.gpus or 2), *PROBE]
    return Diagnosis([report], _check_collective(_torchrun(options)))


def _diagnose_all_hosts(launch: Launch) -> Diagnosis | None:
    master = launch.master[0] if launch.spans_hosts else None
    report = examine(master=master) if launch.local_rank == 0 else None
    measured, gathered = measure_with_all_ranks(launch, report)
    if launch.rank:
        return None
    return Diagnosis([report for report in gathered if report], _describe(measured))


def _torchrun(options: list[str]) -> CompletedProcess[str]:
    """Run torchrun until it exits."""
    arguments = [sys.executable, "-m", "torch.distributed.run", *options]
    process = Popen(arguments, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=PROBE_TIMEOUT)
    except TimeoutExpired:
        process.terminate()  # torchrun forwards it to its ranks
        output, _ = process.communicate()
    return CompletedProcess(arguments, process.returncode, output)


def _check_collective(launched: CompletedProcess[str]) -> Check:
    """What the ranks measured, or why they could not."""
    output = launched.stdout
    results = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if not results or launched.returncode:
        errors = [message or raised for message, raised in ERRORS.findall(output)]
        message = errors[0] if errors else f"no answer within {PROBE_TIMEOUT} s"
        check = Check.failed("all ranks", message)
        return check if check.advice else replace(check, advice="docs/multinode.md explains errors")
    return _describe(parse_json(results[0].removeprefix(PREFIX), "what rank 0 has measured"))


def _describe(measured: dict[str, Any]) -> Check:
    milliseconds = measured["round_trip"] * 1e3
    text = f"{measured['ranks']} ranks, {measured['backend']}: round trip {milliseconds:.2f} ms"
    if measured["ranks"] > 1:
        text += (
            f", all_to_all sends {measured['rate'] / 1e9:.2f} GB/s from each rank "
            f"({measured['bytes'] / 1e6:.0f} MB)"
        )
    return Check("all ranks", text)
