"""The command ``opensora-sp``.

A subcommand is a module with ``HELP``, ``EXAMPLE`` (in a folder that ``init`` has written),
``parser`` and ``run``.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from opensora_sp import __version__
from opensora_sp.common.console import Parser, exit_on_interrupt, log_to_terminal, report_errors
from opensora_sp.runtime.processes import end_with_launchers

# The usual path, in its order, and then tools.
PATH = ("init", "index", "precompute", "train", "sample", "eval")
TOOLS = ("studio", "plan", "verify", "config", "convert", "doctor")
COMMANDS = {name: import_module(f"opensora_sp.cli.{name}") for name in (*PATH, *TOOLS)}
# Runs on one process or on several, which a launcher starts.
RUNS = ("precompute", "train", "sample", "eval")
DESCRIPTION = f"""\
Train and sample STDiT video diffusion models with sequence parallelism.
The usual path: {", ".join(PATH)}; precompute is optional, and the
other commands are tools.
On several processes: torchrun --nproc_per_node N -m opensora_sp.cli COMMAND ..."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand; a user's error is one message, with exit status 2."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    name = words[0] if words else ""
    if name in RUNS:
        # First of all: nothing that is imported from here on can delay it.
        end_with_launchers()
        exit_on_interrupt()
        log_to_terminal()

    args = command_line(name).parse_args(words)
    args.words = words
    with report_errors():
        COMMANDS[args.command].run(args)


def command_line(chosen: str) -> argparse.ArgumentParser:
    """The command with all subcommands, of which only the chosen one has its arguments.

    Those of the others are not needed, and may take seconds to import.
    """
    command = Parser(
        prog="opensora-sp",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--version", action="version", version=f"opensora-sp {__version__}")
    subcommands = command.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        parents = [module.parser()] if name == chosen else []
        subcommands.add_parser(
            name,
            help=module.HELP,
            description=textwrap.fill(module.HELP, 90),
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
            add_help=name != chosen,
        )
    return command
