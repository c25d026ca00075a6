"""The command ``opensora-sp``. A subcommand is a module with ``HELP``, ``parser`` and ``run``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opensora_sp.console import report_errors

from . import config, convert, doctor, eval, index, plan, report, verify

COMMANDS = {
    "config": config,
    "plan": plan,
    "verify": verify,
    "index": index,
    "eval": eval,
    "convert": convert,
    "report": report,
    "doctor": doctor,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand; a user's error is one message, with exit status 2."""
    parser = argparse.ArgumentParser(
        prog="opensora-sp", description="Tools around training with sequence parallelism."
    )
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        options = dict(help=module.HELP, description=module.HELP, add_help=False)
        subcommands.add_parser(name, parents=[module.parser()], **options)

    args = parser.parse_args(arguments)
    with report_errors():
        COMMANDS[args.command].run(args)
