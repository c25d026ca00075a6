"""``opensora-sp doctor``: whether a run would start here, or on all hosts of a hostfile; an issue needs its output."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opensora_sp.runtime.doctor.device import Examination
    from opensora_sp.runtime.doctor.diagnosis import Diagnosis
    from opensora_sp.runtime.doctor.host_report import Check

HELP = "look at this machine, or at all hosts of a hostfile, and say what would keep a run from starting"
WIDTH = 110
LABEL = 18


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "--hostfile",
        metavar="F",
        help="of colossalai run: one host a line, the first one with rank 0",
    )
    parser.add_argument(
        "--ssh-port", type=int, default=22, metavar="N", help="as for colossalai run (default: 22)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=29500,
        metavar="N",
        help="as for launchers (default: 29500)",
    )
    parser.add_argument(
        "--no-collective", dest="collective", action="store_false", help="start no ranks"
    )
    parser.add_argument(
        "--json", action="store_true", help="the same as JSON, with what must be equal on all hosts"
    )
    parser.add_argument(
        "--device",
        nargs="?",
        const="cuda",
        choices=["cuda", "cpu"],
        help="compare what this machine's GPUs compute with the CPU, in two minutes, instead of the above; with --json "
        "for an issue. cpu runs the same checks, small, without a GPU",
    )
    parser.add_argument(
        "--master-addr", help=argparse.SUPPRESS
    )  # how a doctor asks those of other hosts
    parser.add_argument("--no-port", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print what was found; exits with 1 where a run would not start, or a check of the device fails."""
    if args.device is not None:
        _run_device(args)
        return

    from opensora_sp.runtime.doctor.diagnosis import diagnose, diagnose_here

    if args.hostfile is not None:
        found = diagnose(args.hostfile, args.master_port, args.ssh_port, collective=args.collective)
    else:
        port = None if args.no_port else args.master_port
        found = diagnose_here(port, collective=args.collective, master=args.master_addr)
    sys.stdout.write((json.dumps(found.to_dict(), indent=1) if args.json else table(found)) + "\n")
    if not found.ok:
        sys.exit(1)


def _run_device(args: argparse.Namespace) -> None:
    from opensora_sp.runtime.doctor.device import examine_device, setup_for

    if args.hostfile is not None:
        raise ValueError(
            "got --device and --hostfile; expected one of them; run --device on each host"
        )
    found = examine_device(setup_for(args.device))
    sys.stdout.write(
        (json.dumps(found.to_dict(), indent=1) if args.json else device_table(found)) + "\n"
    )
    if not found.ok:
        sys.exit(1)


def device_table(found: Examination) -> str:
    """A line for each finding: what was measured, what is allowed, the verdict; below it why it is not good."""
    width = max(len(finding.name) for finding in found.findings)
    lines = [found.device, f"  {'check':{width}}  {'got':>12}  {'bound':>12}  verdict"]
    for finding in found.findings:
        sign = ">=" if finding.at_least else "<="
        bound = "-" if finding.bound is None else f"{sign} {finding.bound:.3g}"
        got = "-" if finding.got is None else f"{finding.got:.3g} {finding.unit}".strip()
        lines.append(f"  {finding.name:{width}}  {got:>12}  {bound:>12}  {finding.verdict}")
        if finding.note and finding.verdict != "ok":
            lines.append(f"    -> {finding.note}")

    wrong = sum(finding.verdict == "FAIL" for finding in found.findings)
    total = f"{sum(found.seconds.values()):.0f} s"
    verdict = f"{wrong} of {len(found.findings)} findings failed" if wrong else "no finding failed"
    return "\n".join([*lines, "", f"{verdict}, {total}"])


def table(diagnosis: Diagnosis) -> str:
    """A line for each check, longer ones wrapped, with what to do below those that are not good."""
    lines: list[str] = []
    for report in diagnosis.reports:
        lines += [
            f"host {report.host}",
            *(line for check in report.checks for line in _lines(check)),
            "",
        ]
    if diagnosis.together is not None:
        lines += ["together", *_lines(diagnosis.together), ""]
    checks = [check for report in diagnosis.reports for check in report.checks]
    checks += [] if diagnosis.together is None else [diagnosis.together]
    failed, warned = (
        sum(check.status == status for check in checks) for status in ("FAIL", "warn")
    )
    verdict = (
        f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    )
    return "\n".join([*lines, verdict + (f", {warned} with a warning" if warned else "")])


def _lines(check: Check) -> list[str]:
    width = min(WIDTH, max(60, shutil.get_terminal_size((WIDTH, 24)).columns))
    margin = " " * (7 + LABEL + 1)
    first = f"  {check.status:5}{check.name:{LABEL}} "
    lines = textwrap.wrap(
        check.found, width, initial_indent=first, subsequent_indent=margin, break_on_hyphens=False
    )
    if check.advice:
        lines += textwrap.wrap(
            check.advice,
            width,
            initial_indent=margin + "-> ",
            subsequent_indent=margin + "   ",
            break_on_hyphens=False,
        )
    return lines or [first]
