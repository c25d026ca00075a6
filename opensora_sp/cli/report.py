"""``opensora-sp report``: loss, speed and memory of training runs, as a PNG and an HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "plot loss, speed and memory of finished or running training runs, as PNG and HTML"
EXAMPLE = "opensora-sp report outputs/first"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="folder of a run; several share one page",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: the first run's folder)",
    )

    return parser


def run(args: argparse.Namespace) -> None:
    """Write the report and print its paths."""
    from opensora_sp.training.report import report

    for path in report(args.runs, args.runs[0] if args.output is None else args.output):
        sys.stdout.write(f"{path}\n")
