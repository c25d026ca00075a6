"""All hosts of a run: examined, compared, and tested with a collective over all ranks."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, Popen, TimeoutExpired
from typing import Any

from opensora_sp.json_reader import parse_json

from .host_report import Check, Report, examine
from .probe import PREFIX
from .ssh import Remote, is_this_host, read_hostfile

EXAMINE_TIMEOUT, PROBE_TIMEOUT = 60, 100  # seconds
PROBE = ["-m", "opensora_sp.runtime.doctor.probe"]
ERRORS = re.compile(
    r"^error(?: \(rank \d+\))?: (.*)|^(?:\[rank\d+\]: )?(\w*(?:\.\w+)*Error: .*)", re.MULTILINE
)


@dataclass(frozen=True)
class Diagnosis:
    """Reports of all hosts, in the hostfile's order, and the check of a collective of all ranks."""

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


def diagnose_here(port: int | None, *, collective: bool, master: str | None = None) -> Diagnosis:
    """Diagnose this host alone; ``master`` is the first host, if this is one of several."""
    report = examine(port=port, master=master)
    if not collective:
        return Diagnosis([report])

    ranks = report.gpus or 2
    launched = _torchrun(None, ["--standalone", "--nproc_per_node", str(ranks), *PROBE])
    return Diagnosis([report], _check_collective([launched]))


def diagnose(hostfile: str, port: int, ssh_port: int, *, collective: bool) -> Diagnosis:
    """Diagnose all hosts of a hostfile, and compare them.

    Raises:
        ValueError: if the hostfile cannot be used.
    """
    names = read_hostfile(hostfile)
    remotes = [None if is_this_host(name) else Remote.of(name, ssh_port) for name in names]
    try:
        with ThreadPoolExecutor(len(names)) as threads:
            ports = [port] + [None] * (len(names) - 1)  # only rank 0 listens
            examine_one = partial(_examine_host, master=names[0])
            reports = list(threads.map(examine_one, names, remotes, ports))
            _compare(reports)
            if not collective:
                return Diagnosis(reports)

            # With a host that cannot start, the others would wait for it until the timeout.
            failing = [report.host for report in reports if not report.ok]
            if failing:
                found = f"skipped: fix {', '.join(failing)} first"
                return Diagnosis(reports, Check("all ranks", found, "warn"))

            ranks = min(report.gpus for report in reports) or (2 if len(names) == 1 else 1)
            master = ["--master_addr", names[0], "--master_port", str(port)]
            nodes = ["--nproc_per_node", str(ranks), "--nnodes", str(len(names))]
            commands = [
                [*nodes, *master, "--node_rank", str(number), *PROBE]
                for number in range(len(names))
            ]
            launched = list(threads.map(_torchrun, remotes, commands))
            return Diagnosis(reports, _check_collective(launched))
    finally:
        for remote in remotes:
            if remote is not None:
                remote.connection.close()


def _examine_host(name: str, remote: Remote | None, port: int | None, *, master: str) -> Report:
    """The report of one of several hosts, with the checks of the connection to it."""
    if remote is None:
        return replace(examine(port=port, master=master), host=name)

    report = Report(name, [remote.connect()])
    if not report.ok:
        return report

    try:
        report.checks.append(remote.clock())
        port_option = ["--master-port", str(port)] if port else ["--no-port"]
        there = remote.examine("--master-addr", master, *port_option, timeout=EXAMINE_TIMEOUT)
    except Exception as error:  # a connection fails in many ways; other hosts are still examined
        report.checks.append(Check.failed("opensora-sp", str(error)))
        return report
    return replace(there, host=name, checks=report.checks + there.checks)


def _compare(reports: list[Report]) -> None:
    """Add to each report how it differs from the first one that has facts."""
    with_facts = [report for report in reports if report.facts]
    for report in with_facts[1:]:
        first = with_facts[0]
        name = f"same as {first.host}"
        different = []
        for fact in sorted({*first.facts, *report.facts}):
            here, there = first.facts.get(fact), report.facts.get(fact)
            if here != there:
                different.append(f"{fact} {there} ({here} on {first.host})")
        if report.gpus != first.gpus:
            different.append(f"{report.gpus} GPUs ({first.gpus} on {first.host})")

        if different:
            advice = "install the same on every host: ranks that differ are refused at the start"
            report.checks.append(Check(name, ", ".join(different), "FAIL", advice))
        else:
            report.checks.append(Check(name, "code, versions and number of GPUs"))


def _torchrun(remote: Remote | None, options: list[str]) -> CompletedProcess[str]:
    """Run torchrun on a host until it exits."""
    arguments = ["-m", "torch.distributed.run", *options]
    if remote is not None:
        done = remote.python(*arguments, timeout=PROBE_TIMEOUT)
        return CompletedProcess(arguments, done.exited, done.stdout + done.stderr)

    process = Popen(
        [sys.executable, *arguments],
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=PROBE_TIMEOUT)
    except TimeoutExpired:
        process.terminate()  # torchrun forwards it to its ranks
        output, _ = process.communicate()
    return CompletedProcess(arguments, process.returncode, output)


def _check_collective(launched: list[CompletedProcess[str]]) -> Check:
    """What the ranks of all hosts measured, or why they could not."""
    output = "\n".join(one.stdout for one in launched)
    results = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if not results or any(one.returncode for one in launched):
        errors = [message or raised for message, raised in ERRORS.findall(output)]
        message = errors[0] if errors else f"no answer within {PROBE_TIMEOUT} s"
        check = Check.failed("all ranks", message)
        return check if check.advice else replace(check, advice="docs/multinode.md explains errors")

    facts = parse_json(results[0].removeprefix(PREFIX), "what rank 0 has measured")
    milliseconds = facts["round_trip"] * 1e3
    found = f"{facts['ranks']} ranks, {facts['backend']}: round trip {milliseconds:.2f} ms"
    if facts["ranks"] > 1:
        found += (
            f", all_to_all sends {facts['rate'] / 1e9:.2f} GB/s from each rank "
            f"({facts['bytes'] / 1e6:.0f} MB)"
        )
    return Check("all ranks", found)
