"""``opensora-sp eval``: the held-out loss of a checkpoint by bucket and timestep."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from opensora_sp.common.console import Parser, add_allow_pickle

HELP = (
    "measure the held-out loss of a checkpoint by bucket and timestep, on any number of processes"
)
EXAMPLE = "opensora-sp eval outputs/first --manifest data/clips.csv"


def parser() -> argparse.ArgumentParser:
    parser = Parser(description=HELP)
    add = parser.add_argument
    add("ckpt", metavar="CKPT", help="weights: a run's folder, a checkpoint, a folder or a file")
    add("--manifest", required=True, metavar="FILE", help="held-out clips: CSV, JSONL or Parquet")
    add(
        "--config",
        metavar="CONFIG",
        help="training config with encoders, sizes and scheduler (default: the checkpoint's)",
    )
    add(
        "--lora",
        action="append",
        default=[],
        metavar="PATH[:SCALE]",
        help="LoRA adapters to merge into the weights; those of a run CKPT are merged without it",
    )
    add("--bins", type=int, default=10, metavar="K", help="bins of timesteps (default: 10)")
    add(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="draws of noise and timesteps, from the config's seed on, over which confidence "
        "intervals are computed (default: 3)",
    )
    add(
        "--sp-size",
        type=int,
        metavar="P",
        help="processes that share a batch (default: sp_size if it divides the processes, else 1)",
    )
    add("--no-ema", action="store_true", help="evaluate the trained weights, not their average")
    add("--output", metavar="FILE", help="also write the numbers to a JSON file")
    add(
        "--cfg-options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override values of the config, for example batch_size=8 precision=fp32",
    )
    add_allow_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Evaluate; rank 0 prints the table and writes the JSON file."""
    from opensora_sp.data.atomic import atomic_write, check_writable
    from opensora_sp.evaluation.run import Settings, evaluate
    from opensora_sp.runtime.rendezvous import raise_on_all_ranks

    output = None if args.output is None else Path(args.output)
    with raise_on_all_ranks():
        if output is not None:
            check_writable(output.parent)
    found = evaluate(
        Settings(
            args.ckpt,
            args.manifest,
            config=args.config,
            overrides=tuple(args.cfg_options),
            bins=args.bins,
            seeds=args.seeds,
            sp_size=args.sp_size,
            use_ema=not args.no_ema,
            allow_pickle=args.allow_pickle,
            lora=tuple(args.lora),
        )
    )

    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(found.table() + "\n")
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(output) as partial:
                partial.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
