"""``opensora-sp eval``: the held-out loss of a checkpoint by bucket and timestep."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from opensora_sp.common.console import Parser, add_allow_pickle, add_cfg_options
from opensora_sp.common.files import atomic_write, check_writable
from opensora_sp.evaluation.evaluate import Settings, evaluate
from opensora_sp.runtime.rendezvous import raise_on_all_ranks


def parser() -> argparse.ArgumentParser:
    parser = Parser()
    add = parser.add_argument
    add("ckpt", metavar="CKPT", help="weights: a run's folder, a checkpoint, a folder or a file")
    add("--manifest", required=True, metavar="FILE", help="held-out clips: CSV, JSONL or Parquet")
    config = "training config with encoders, sizes and scheduler (default: the checkpoint's)"
    add("--config", metavar="CONFIG", help=config)
    lora = "LoRA adapters to merge into the weights; a run CKPT has its own merged without it"
    add("--lora", action="append", default=[], metavar="PATH[:SCALE]", help=lora)
    add("--bins", type=int, default=10, metavar="K", help="bins of timesteps (default: 10)")
    seeds = (
        "draws of noise and timesteps, from the config's seed on, over which confidence intervals "
        "are computed (default: 3)"
    )
    add("--seeds", type=int, default=3, metavar="N", help=seeds)
    ranks = "processes that share a batch (default: sp_size if it divides the processes, else 1)"
    add("--sp-size", type=int, metavar="P", help=ranks)
    add("--no-ema", action="store_true", help="evaluate the trained weights, not their average")
    add("--output", type=Path, metavar="FILE", help="also write the numbers to a JSON file")
    add_cfg_options(parser)
    add_allow_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Evaluate; rank 0 prints the table and writes the JSON file."""
    # Before the evaluation, which may take hours.
    with raise_on_all_ranks():
        if args.output is not None:
            check_writable(args.output.parent)
    same = {name: getattr(args, name) for name in ("config", "bins", "seeds", "sp_size")}
    evaluation = evaluate(
        Settings(
            args.ckpt,
            args.manifest,
            overrides=tuple(args.cfg_options),
            use_ema=not args.no_ema,
            allow_pickle=args.allow_pickle,
            lora=tuple(args.lora),
            **same,
        )
    )

    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(evaluation.table() + "\n")
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(args.output) as partial:
                partial.write_text(
                    json.dumps(evaluation.to_dict(), indent=1) + "\n", encoding="utf-8"
                )
