"""``opensora-sp sample``: videos from a checkpoint; ``scripts/inference.py`` is the same."""

from __future__ import annotations

import argparse

HELP = "sample videos or images from a checkpoint, on any number of processes"
EXAMPLE = (
    "torchrun --nproc_per_node 2 -m opensora_sp.cli sample outputs/first/sample.py "
    "--ckpt outputs/first --prompts prompts.txt"
)


def parser() -> argparse.ArgumentParser:
    # Sampling takes seconds to import.
    from opensora_sp.sampling.command import parser

    return parser()


def run(args: argparse.Namespace) -> None:
    """Sample; every rank calls it."""
    from opensora_sp.runtime.rendezvous import raise_on_all_ranks
    from opensora_sp.sampling import sample
    from opensora_sp.sampling.command import config_of

    with raise_on_all_ranks():
        cfg = config_of(args)
    sample(cfg)
