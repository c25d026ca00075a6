"""``opensora-sp verify``: one step of a config's model with and without sequence parallelism,
compared.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from opensora_sp.console import config_arguments

if TYPE_CHECKING:
    from opensora_sp.parallel import Verdict

HELP = "run one step of a config's model with and without sequence parallelism, small, on CPU, and compare"
SHOWN = 5  # gradients named without --all


def parser() -> argparse.ArgumentParser:
    parser = config_arguments(HELP)
    parser.add_argument(
        "--ranks", type=int, metavar="P", help="processes that share the batch (default: sp_size)"
    )
    parser.add_argument(
        "--depth", type=int, default=2, help="blocks, or pairs of blocks, to keep (default: 2)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="tokens of a sample to keep (default: 512)"
    )
    parser.add_argument(
        "--all", action="store_true", help="name every gradient, not only those furthest apart"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the comparison; exits with 1 where the results differ."""
    from opensora_sp.config import load_train_config
    from opensora_sp.parallel.strategies import WholeSamples
    from opensora_sp.verification import verify_config

    cfg = load_train_config(args.config, args.cfg_options)
    ranks = cfg.sp_size if args.ranks is None else args.ranks
    shape, strategy, verdict = verify_config(
        cfg, ranks, depth=args.depth, max_tokens=args.max_tokens
    )
    options = {
        key: value
        for key, value in dict(cfg.sequence_parallel).items()
        if value not in (None, False, 1)
    }
    sys.stdout.write(
        f"{cfg.model['type']} on {ranks} ranks and on one, float64, latents {list(shape)}, "
        f"{options}\n"
    )
    nothing = ""
    if strategy is WholeSamples:
        nothing = ": no token moves, nothing of the exchanges is tested"
    sys.stdout.write(f"strategy: {strategy.label}{nothing}\n")
    sys.stdout.write(report(verdict, shown=None if args.all else SHOWN) + "\n")
    if not verdict.agrees:
        sys.exit(1)


def report(verdict: Verdict, *, shown: int | None) -> str:
    """The output's difference, and the largest of the gradients'."""
    ordered: list[tuple[str, Any]] = sorted(verdict.gradients.items(), key=lambda named: -named[1])
    lines = [
        f"output: {verdict.output:.1e} apart, relative to its largest entry",
        f"{len(ordered)} gradients{'' if shown is None else ', the furthest apart'}:",
        *(f"  {difference:.1e}  {name}" for name, difference in ordered[:shown]),
    ]
    if verdict.all_zero:
        lines.append(f"zero in both, so not tested: {', '.join(verdict.all_zero)}")
    return "\n".join(
        [*lines, f"{'equal' if verdict.agrees else 'NOT EQUAL'} (allowed: {verdict.tolerance:.0e})"]
    )
