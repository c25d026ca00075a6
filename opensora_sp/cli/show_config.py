"""``opensora-sp config``: the resolved config of all its files and options."""

from __future__ import annotations

import argparse
import sys

from opensora_sp.common.console import config_arguments, log_to_terminal
from opensora_sp.config import dump_config, load_either
from opensora_sp.config.load import sources


def parser() -> argparse.ArgumentParser:
    parser = config_arguments()
    explain = "one value per line, each with its origin"
    parser.add_argument("--explain", action="store_true", help=explain)
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the config as a file that can be run, or with the origin of each value."""
    log_to_terminal()
    cfg, draft = load_either(args.config, args.cfg_options)
    if not args.explain:
        sys.stdout.write(dump_config(cfg))
        return

    lines = [(f"{key} = {setting!r}", source) for key, setting, source in sources(cfg, draft)]
    width = min(60, max(len(line) for line, _ in lines))
    sys.stdout.write("".join(f"{line:<{width}}  # {source}\n" for line, source in lines))
