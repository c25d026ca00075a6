"""``opensora-sp doctor``: whether a run would start on this host, or on all hosts of a launcher."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_sp.common.files import atomic_write
from opensora_sp.runtime.doctor.diagnosis import Check, Diagnosis, diagnose

if TYPE_CHECKING:
    from opensora_sp.runtime.doctor.device import Examination, Finding

WIDTH = 100
LABEL_WIDTH = 18
CHECK_WIDTH = 46  # of the longest name of a finding, about
MARGIN = " " * (7 + LABEL_WIDTH + 1)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--no-collective", dest="collective", action="store_false", help="start no ranks")
    output = (
        "report as JSON, with what must be equal on all hosts. With --device, FILE is written "
        "after each finding, so that a run that is stopped leaves what it found"
    )
    add("--json", nargs="?", const="", metavar="FILE", help=output)
    device = (
        "instead compare the results of this host's GPUs with the CPU, in two minutes; with --json "
        "for an issue. cpu runs the same checks, small, without a GPU"
    )
    add("--device", nargs="?", const="cuda", choices=["cuda", "cpu"], help=device)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report; exits with 1 if a run would not start, or a check of the device fails."""
    result: Diagnosis | Examination
    if args.device is not None:
        result = _examine_device(args)
        failed = sum(finding.verdict == "FAIL" for finding in result.findings)
        text = f"\n{failed} of {len(result.findings)} findings failed, {result.seconds:.0f} s"
    else:
        diagnosis = diagnose(collective=args.collective)
        if diagnosis is None:
            return
        result, text = diagnosis, table(diagnosis)

    if args.json:
        _write_json(result, args.json)
    if args.json == "":
        text = _as_json(result)
    _say(text)
    if not result.ok:
        sys.exit(1)


def _as_json(result: Diagnosis | Examination) -> str:
    return json.dumps(result.to_dict(), indent=1)


def _write_json(result: Diagnosis | Examination, file: str) -> None:
    with atomic_write(Path(file)) as partial:
        partial.write_text(_as_json(result) + "\n")


def _examine_device(args: argparse.Namespace) -> Examination:
    from opensora_sp.runtime.doctor.device import Examination, setup_for

    examination = Examination(setup_for(args.device))
    prints = args.json != ""
    if prints:
        _say(f"{examination.setup.name}\n  {'check':{CHECK_WIDTH}}  error / rounding  verdict")
    for finding in examination.run():
        if args.json:
            _write_json(examination, args.json)
        if prints:
            _say(device_line(finding))
    return examination


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def device_line(finding: Finding) -> str:
    """Measured error and verdict; below it the note if it did not pass."""
    got = "-" if finding.got is None else f"{finding.got:.3g}"
    line = f"  {finding.name:{CHECK_WIDTH}}  {got:>20}  {finding.verdict}"
    return line if finding.verdict == "ok" else f"{line}\n    -> {finding.note}"


def table(diagnosis: Diagnosis) -> str:
    """A line per check, with advice below those that did not pass; long lines are wrapped."""
    lines: list[str] = []
    for report in diagnosis.reports:
        lines += [f"host {report.host}", *_lines(report.checks), ""]
    if diagnosis.collective is not None:
        lines += ["all hosts", *_lines([diagnosis.collective]), ""]

    statuses = [check.status for check in diagnosis.checks]
    failed, warned = statuses.count("FAIL"), statuses.count("warn")
    total = len(statuses)
    verdict = f"{failed} of {total} checks failed" if failed else f"all {total} checks passed"
    return "\n".join([*lines, verdict + (f", {warned} with a warning" if warned else "")])


def _lines(checks: list[Check]) -> list[str]:
    lines = []
    for check in checks:
        label = f"  {check.status:5}{check.name:{LABEL_WIDTH}} "
        lines += _wrap(check.result, label, MARGIN) or [label]
        lines += _wrap(check.advice, MARGIN + "-> ", MARGIN + "   ")
    return lines


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width=WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
