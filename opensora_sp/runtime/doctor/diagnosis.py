"""All hosts of a run examined, compared, and tried together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from .host_report import Check, Report, examine
from .probe import MARK
from .ssh import Remote, is_this_host, read_hostfile

EXAMINED, PROBED = 60, 100  # seconds after which a host has said nothing
MODULE = "opensora_sp.runtime.doctor.probe"
ERRORS = re.compile(
    r"^error(?: \(rank \d+\))?: (.*)|^(?:\[rank\d+\]: )?(\w*(?:\.\w+)*Error: .*)", re.MULTILINE
)


@dataclass(frozen=True)
class Diagnosis:
    """Reports of all hosts, that of the first or only one first, and what their ranks did together."""

    reports: list[Report]
    together: Check | None = None

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.reports) and (
            self.together is None or self.together.status != "FAIL"
        )

    def to_dict(self) -> dict[str, Any]:
        """That of the only host where there is but one, with ``hosts`` of all others where there are several."""
        first, *others = (report.to_dict() for report in self.reports)
        together = None if self.together is None else vars(self.together)
        return {**first, "hosts": others, "collective": together, "ok": self.ok}


def diagnose_here(port: int | None, *, collective: bool, master: str | None = None) -> Diagnosis:
    """This host by itself; ``master`` is the first host of those that it is one of."""
    report = examine(port=port, master=master)
    if not collective:
        return Diagnosis([report])
    ranks = report.gpus or 2
    return Diagnosis(
        [report],
        _together([_on(None, ["--standalone", "--nproc_per_node", str(ranks), "-m", MODULE])]),
    )


def diagnose(hostfile: str, port: int, ssh_port: int, *, collective: bool) -> Diagnosis:
    """All hosts of a hostfile, compared with this one.

    Raises:
        ValueError: if the hostfile cannot be used.
    """
    names = read_hostfile(hostfile)
    ways = [None if is_this_host(name) else Remote.of(name, ssh_port) for name in names]
    try:
        with ThreadPoolExecutor(len(names)) as threads:
            ports = [port] + [None] * (len(names) - 1)  # only rank 0 listens
            reports = list(threads.map(partial(_host, master=names[0]), names, ways, ports))
            _compare(reports)
            if not collective:
                return Diagnosis(reports)
            failing = [report.host for report in reports if not report.ok]
            if failing:  # each host would wait long for one that cannot start
                return Diagnosis(
                    reports,
                    Check("all ranks", f"not tried before {', '.join(failing)} can", "warn"),
                )
            ranks = min(report.gpus for report in reports) or (2 if len(names) == 1 else 1)
            command = [
                "--nproc_per_node",
                str(ranks),
                "--nnodes",
                str(len(names)),
                "--master_addr",
                names[0],
            ]
            command += ["--master_port", str(port)]
            started = threads.map(
                lambda one: _on(one[1], [*command, "--node_rank", str(one[0]), "-m", MODULE]),
                enumerate(ways),
            )
            return Diagnosis(reports, _together(list(started)))
    finally:
        for way in ways:
            if way is not None:
                way.connection.close()


def _host(name: str, way: Remote | None, port: int | None, *, master: str) -> Report:
    """One host of several, as it says itself and as it is reached from here."""
    if way is None:
        return Report(**{**vars(examine(port=port, master=master)), "host": name})
    report = Report(name, [way.connect()])
    if not report.ok:
        return report
    try:
        report.checks.append(way.clock())
        options = [
            "--master-addr",
            master,
            *(["--master-port", str(port)] if port else ["--no-port"]),
        ]
        there = way.examine(*options, seconds=EXAMINED)
    except (
        Exception
    ) as error:  # a connection can break in many ways; one host's must not end the others' report
        found, _, advice = str(error).partition("; ")
        report.checks.append(Check("opensora-sp", found.removeprefix("got "), "FAIL", advice))
        return report
    return Report(name, report.checks + there.checks, there.facts, there.gpus)


def _compare(reports: list[Report]) -> None:
    """Add to each report what it does not share with the first one that has facts."""
    first = next((report for report in reports if report.facts), None)
    for report in reports:
        if first is None or report is first or not report.facts:
            continue
        differing = [
            f"{name} {report.facts.get(name)} ({first.facts.get(name)} on {first.host})"
            for name in sorted({*first.facts, *report.facts})
            if first.facts.get(name) != report.facts.get(name)
        ]
        if report.gpus != first.gpus:
            differing.append(f"{report.gpus} GPUs ({first.gpus} on {first.host})")
        if differing:
            advice = "install the same on every host: ranks that differ are refused at the start"
            report.checks.append(
                Check(f"same as {first.host}", ", ".join(differing), "FAIL", advice)
            )
        else:
            report.checks.append(
                Check(f"same as {first.host}", "code, versions and number of GPUs")
            )


def _on(way: Remote | None, options: list[str]) -> tuple[int, str]:
    """Run torchrun on a host; its exit status and all it said."""
    arguments = ["-m", "torch.distributed.run", *options]
    if way is not None:
        done = way.python(*arguments, seconds=PROBED)
        return done.exited, done.stdout + done.stderr
    started = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        said, _ = started.communicate(timeout=PROBED)
    except subprocess.TimeoutExpired:
        started.terminate()  # which torchrun passes on to its ranks
        said, _ = started.communicate()
    return started.returncode, said


def _together(started: list[tuple[int, str]]) -> Check:
    """What the ranks of all hosts measured, or why they could not."""
    said = "\n".join(output for _, output in started)
    marked = next((line for line in said.splitlines() if line.startswith(MARK)), None)
    if marked is None or any(status for status, _ in started):
        reasons = [sentence or raised for sentence, raised in ERRORS.findall(said)]
        found, _, advice = (reasons or [f"no answer within {PROBED} s"])[0].partition("; ")
        return Check(
            "all ranks",
            found.removeprefix("got "),
            "FAIL",
            advice or "docs/multinode.md explains errors",
        )
    facts = json.loads(marked.removeprefix(MARK))
    found = (
        f"{facts['ranks']} ranks, {facts['backend']}: round trip {facts['round_trip'] * 1e3:.2f} ms"
    )
    if facts["ranks"] > 1:
        found += f", all_to_all sends {facts['rate'] / 1e9:.2f} GB/s from each rank ({facts['bytes'] / 1e6:.0f} MB)"
    return Check("all ranks", found)
