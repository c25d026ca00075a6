"""``opensora-sp sample``: videos from a checkpoint; ``scripts/inference.py`` is the same."""

from __future__ import annotations

import argparse

from opensora_sp.runtime.rendezvous import raise_on_all_ranks
from opensora_sp.sampling import sample
from opensora_sp.sampling.command import config_of
from opensora_sp.sampling.command import parser as parser


def run(args: argparse.Namespace) -> None:
    """Sample; every rank calls it."""
    with raise_on_all_ranks():
        cfg = config_of(args)
    sample(cfg)
