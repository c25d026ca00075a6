"""``opensora-sp train``: a training run; ``scripts/train.py`` is the same."""

from __future__ import annotations

import argparse

from opensora_sp.common.console import add_allow_pickle, config_arguments
from opensora_sp.config import load_train_config
from opensora_sp.runtime.rendezvous import raise_on_all_ranks
from opensora_sp.training.run import train


def parser() -> argparse.ArgumentParser:
    parser = config_arguments()
    add = parser.add_argument
    resume = (
        "resume from the newest checkpoint in the run's folder, or from a given one; none starts "
        "from step 0 in a folder of checkpoints that cannot be resumed"
    )
    add("--resume", metavar="auto|none|PATH", help=resume)
    new_data = "resume also if the manifest is not the one that the checkpoint was written with"
    add("--accept-new-data", action="store_true", help=new_data)
    profile = "write a trace of a step (3) or of several (10-12) into the run's folder"
    add("--profile", metavar="STEPS", help=profile)
    add_allow_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Train; every rank calls it."""
    with raise_on_all_ranks():
        cfg = load_train_config(args.config, args.cfg_options)
    if args.allow_pickle:
        cfg = cfg.model_copy(update={"allow_pickle": True})
    train(cfg, resume=args.resume, profile=args.profile, accept_new_data=args.accept_new_data)
