"""``opensora-sp precompute``: a feature cache; ``scripts/precompute.py`` is the same."""

from __future__ import annotations

import argparse

from opensora_sp.common.console import config_arguments

HELP = (
    "encode the clips of a config once into a feature cache, to train from with CachedFeatures; "
    "started again, it resumes"
)
EXAMPLE = (
    "torchrun --nproc_per_node 2 -m opensora_sp.cli precompute configs/demo/first.py -o cache/first"
)


def parser() -> argparse.ArgumentParser:
    parser = config_arguments(HELP)
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="folder of the feature cache"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Write the cache; every rank calls it."""
    from opensora_sp.config import load_train_config
    from opensora_sp.features.precompute import precompute
    from opensora_sp.runtime.rendezvous import raise_on_all_ranks

    with raise_on_all_ranks():
        cfg = load_train_config(args.config, args.cfg_options)
    precompute(cfg, args.output)
