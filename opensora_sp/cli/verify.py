"""``opensora-sp verify``: compare a step of a config's model with and without SP."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from opensora_sp.common.console import config_arguments
from opensora_sp.config import load_train_config
from opensora_sp.parallel.parity import Verdict
from opensora_sp.parallel.strategies import WholeSamples
from opensora_sp.training.sp_verification import verify_config

SHOWN = 5  # gradients listed


def parser() -> argparse.ArgumentParser:
    parser = config_arguments()
    add = parser.add_argument
    ranks = "ranks that share the batch (default: sp_size)"
    add("--ranks", type=int, metavar="P", help=ranks)
    depth = "blocks, or pairs of blocks, to keep (default: 2)"
    add("--depth", type=int, default=2, help=depth)
    tokens = "tokens per sample to keep (default: 512)"
    add("--max-tokens", type=int, default=512, help=tokens)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the comparison; exits with 1 where the results differ."""
    cfg = load_train_config(args.config, args.cfg_options)
    # With a degree for each micro-batch, --ranks names the one to verify.
    configured = cfg.sp_size if isinstance(cfg.sp_size, int) else 1
    ranks = configured if args.ranks is None else args.ranks
    shape, strategy, verdict = verify_config(
        cfg, ranks, depth=args.depth, max_tokens=args.max_tokens
    )

    set_options = dict(cfg.sequence_parallel).items()
    options = {key: option for key, option in set_options if option not in (None, False, 1)}
    sys.stdout.write(
        f"{cfg.model['type']} on {ranks} ranks and on one, float64, latents {list(shape)}, "
        f"{options}\n"
    )
    moves_nothing = strategy is WholeSamples
    nothing = ": no token moves, so that no exchange is tested" if moves_nothing else ""
    sys.stdout.write(f"strategy: {strategy.label}{nothing}\n")
    sys.stdout.write(report(verdict) + "\n")
    if not verdict.agrees:
        sys.exit(1)


def report(verdict: Verdict) -> str:
    """The relative difference of the output, and the largest ones of the gradients."""
    ordered: list[tuple[str, Any]] = sorted(verdict.gradients.items(), key=lambda named: -named[1])
    lines = [
        f"output: {verdict.output:.1e} apart, relative to its largest entry",
        f"{len(ordered)} gradients, the largest differences:",
        *(f"  {difference:.1e}  {name}" for name, difference in ordered[:SHOWN]),
    ]
    if verdict.all_zero:
        lines.append(f"zero in both, so not tested: {', '.join(verdict.all_zero)}")

    result = "equal" if verdict.agrees else "NOT EQUAL"
    return "\n".join([*lines, f"{result} (allowed: {verdict.tolerance:.0e})"])
