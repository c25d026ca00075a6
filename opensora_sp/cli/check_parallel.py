"""``opensora-sp check-parallel``: one process against P ranks, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys

from opensora_sp.checker import check_parallel
from opensora_sp.common.console import Parser


def parser() -> argparse.ArgumentParser:
    parser = Parser()
    add = parser.add_argument
    definition = (
        "Python file with build() -> model, batch(seed) -> keyword arguments, apply(model, group) "
        "and optionally step(model, batch) -> loss, gradient_norm, validation_loss"
    )
    add("file", metavar="FILE", help=definition)
    add("--ranks", type=int, default=2, metavar="P", help="processes to compare with one")
    add("--json", action="store_true", help="the whole report as JSON")
    dtype = "of weights and inputs: float64 (default), with lower casts lifted, float32, bfloat16"
    add("--dtype", default="float64", help=dtype)
    add("--seed", type=int, default=0, metavar="S", help="of build() and batch()")
    seconds = "after which a rank that has not ended is reported as waiting (default: 60)"
    add("--seconds", type=float, default=60.0, metavar="T", help=seconds)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report; exits with 1 where the results differ."""
    report = check_parallel(
        args.file, ranks=args.ranks, seed=args.seed, dtype=args.dtype, seconds=args.seconds
    )
    text = json.dumps(report.to_dict(), indent=1) if args.json else str(report)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
    if not report.ok:
        sys.exit(1)
