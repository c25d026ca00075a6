"""``opensora-sp check-parallel``: one process against P ranks, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from opensora_sp.checker import check_parallel
from opensora_sp.common.console import Parser


def parser() -> argparse.ArgumentParser:
    parser = Parser()
    add = parser.add_argument
    functions = (
        "Python file with build(), batch(seed), apply(model, group), optionally step(model, batch)"
    )
    add("file", metavar="FILE", help=functions)
    add("--ranks", type=int, default=2, metavar="P", help="processes to compare with one")
    add("--json", action="store_true", help="the whole report as JSON")
    dtype = "of weights and inputs: float64 (default), with lower casts lifted, float32, bfloat16"
    add("--dtype", default="float64", help=dtype)
    add("--seed", type=int, default=0, metavar="S", help="of build() and batch()")
    seconds = "after which a rank that has not ended is reported as waiting (default: 60)"
    add("--seconds", type=float, default=60.0, metavar="T", help=seconds)
    devices = "cpu (default), or cuda: GPUs of this host, in float32 or bfloat16"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=devices)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report; exits with 1 where the results differ."""
    names = ("ranks", "seed", "dtype", "seconds", "device")
    report = check_parallel(args.file, **{name: getattr(args, name) for name in names})
    text = json.dumps(report.to_dict(), indent=1) if args.json else str(report)
    sys.stdout.write(text + "\n")
    if not report.ok:
        sys.exit(1)
