"""``opensora-sp precompute``: a feature cache; ``scripts/precompute.py`` is the same."""

from __future__ import annotations

import argparse

from opensora_sp.common.console import config_arguments
from opensora_sp.config import load_train_config
from opensora_sp.features.cache_writer import precompute
from opensora_sp.runtime.rendezvous import raise_on_all_ranks


def parser() -> argparse.ArgumentParser:
    parser = config_arguments()
    folder = "folder of the feature cache"
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help=folder)
    return parser


def run(args: argparse.Namespace) -> None:
    """Write the cache; every rank calls it."""
    with raise_on_all_ranks():
        cfg = load_train_config(args.config, args.cfg_options)
    precompute(cfg, args.output)
