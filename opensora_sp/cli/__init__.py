"""The command ``opensora-sp``.

A subcommand is a module with ``parser`` and ``run``, which is imported when it is chosen. Its name
is the command's, or says more where the package has a module of that name.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from opensora_sp import __version__
from opensora_sp.common.console import Parser, exit_on_interrupt, log_to_terminal, report_errors
from opensora_sp.common.importing import nearest
from opensora_sp.runtime.processes import end_with_launchers


class Command(NamedTuple):
    """A subcommand, and an example of it in a folder that ``init`` has written.

    Attributes:
        module: of this package; by default of the command's name.
    """

    help: str
    example: str
    module: str = ""


# The usual path, in its order.
PATH = ("init", "index", "precompute", "train", "sample", "eval")
COMMANDS = {
    "init": Command(
        "write a project into a new folder: config, toy clips with manifest, prompts, run script",
        "opensora-sp init project",
    ),
    "index": Command(
        "probe all videos and images of a folder and write the training manifest",
        "opensora-sp index data/clips -o data/clips.csv",
        "index_clips",
    ),
    "precompute": Command(
        "encode the clips of a config once into a feature cache, to train from with "
        "CachedFeatures; started again, it resumes",
        "torchrun --nproc_per_node 2 -m opensora_sp.cli precompute configs/demo/first.py "
        "-o cache/first",
        "precompute_features",
    ),
    "train": Command(
        "train a model from a config; torchrun or colossalai run start it on several processes",
        "torchrun --nproc_per_node 2 -m opensora_sp.cli train configs/demo/first.py",
    ),
    "sample": Command(
        "sample videos or images from a checkpoint, on any number of processes",
        "torchrun --nproc_per_node 2 -m opensora_sp.cli sample outputs/first/sample.py "
        "--ckpt outputs/first --prompts prompts.txt",
    ),
    "eval": Command(
        "measure the held-out loss of a checkpoint by bucket and timestep, on any number of "
        "processes",
        "opensora-sp eval outputs/first --manifest data/clips.csv",
    ),
    "studio": Command(
        "a page in the browser: sample from the runs of this machine, and watch their training",
        "opensora-sp studio outputs",
    ),
    "plan": Command(
        "estimate how ranks share the batches of a config, what they send, memory and seconds",
        "opensora-sp plan configs/stdit3/train/64x512x512_sp8.py --gpus 8",
    ),
    "verify": Command(
        "compare one small step of a config's model with and without sequence parallelism, on CPU",
        "opensora-sp verify configs/demo/first.py",
    ),
    "check-parallel": Command(
        "compare anybody's model under anybody's context parallelism with one process, on CPU",
        "opensora-sp check-parallel mine.py --ranks 3",
        "check_parallel",
    ),
    "config": Command(
        "check a config and print its resolved values",
        "opensora-sp config configs/demo/first.py --explain",
        "show_config",
    ),
    "convert": Command(
        "read weights of a model, a VAE or a T5 in any layout, write config.json and safetensors",
        "opensora-sp convert outputs/first weights/first",
        "convert_weights",
    ),
    "doctor": Command(
        "check this host and report what would keep a run from starting; started by torchrun "
        "or colossalai run, check and compare all of their hosts",
        "opensora-sp doctor",
    ),
}
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

    with report_errors():
        if name not in COMMANDS and not name.startswith("-"):
            raise ValueError(
                f"got the command {name!r}; expected one of {', '.join(COMMANDS)}; "
                f"{nearest(name, COMMANDS)}"
            )
        args = command_line(name).parse_args(words)
        args.words = words
        command_module(args.command).run(args)


def command_module(name: str) -> Any:
    """The module of a subcommand."""
    return import_module(f"opensora_sp.cli.{COMMANDS[name].module or name}")


def command_line(chosen: str) -> argparse.ArgumentParser:
    """The command with all subcommands, of which only the chosen one has its arguments.

    The others may take seconds to import.
    """
    parser = Parser(
        prog="opensora-sp",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"opensora-sp {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        parents = [command_module(name).parser()] if name == chosen else []
        subcommands.add_parser(
            name,
            help=command.help,
            description=textwrap.fill(command.help, 90),
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
            add_help=name != chosen,
        )
    return parser
