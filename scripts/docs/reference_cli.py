"""The reference page of commands, generated from their argument parsers."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from opensora_sp.cli import COMMANDS, command_module

INTRODUCTION = """\
# Command line

Generated from the argument parsers; `--help` prints the same. Exit status: 0 is success, 2 a user
error with a message of one sentence, 1 any other failure.

`precompute`, `train`, `sample` and `eval` run on one process or on several, which a launcher
starts: `torchrun --nproc_per_node N -m opensora_sp.cli COMMAND ...`. In the repository,
`scripts/precompute.py`, `scripts/train.py` and `scripts/inference.py` are the first three. The
examples run in a folder that `opensora-sp init` has written.
"""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(command, its parser) of all commands."""
    for name, command in COMMANDS.items():
        parser = command_module(name).parser()
        parser.description = command.help
        yield f"opensora-sp {name}", parser


def page() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, *(section(name, parser) for name, parser in parsers())])


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """The description, usage, example and arguments of a command."""
    parser.prog = name
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=88)
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            meaning = (action.help or "").replace("|", r"\|")
            rows.append(f"| {_names(action)} | {meaning} |")

    usage = textwrap.dedent(" " * 7 + parser.format_usage().removeprefix("usage: ")).rstrip()
    table = "\n".join(["| argument | meaning |", "| --- | --- |", *rows])
    example = COMMANDS[name.split()[-1]].example
    blocks = f"```text\n{usage}\n```\n\nExample:\n\n```bash\n{example}\n```"
    return f"## {name}\n\n{_sentence(parser.description)}\n\n{blocks}\n\n{table}\n"


def _sentence(text: str | None) -> str:
    text = (text or "").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def _names(action: argparse.Action) -> str:
    """``--gpus N`` or the name of a positional argument, as code."""
    if not action.option_strings:
        shown = action.metavar or action.dest
        return f"`{shown}`" if isinstance(shown, str) else f"`{' '.join(shown)}`"

    if action.nargs == 0:
        value: str | tuple[str, ...] = ""
    else:
        choices = ",".join(map(str, action.choices or ()))
        value = action.metavar or (f"{{{choices}}}" if choices else "")

    suffix = "".join(f" {part}" for part in ((value,) if isinstance(value, str) else value) if part)
    return ", ".join(f"`{option}{suffix}`" for option in action.option_strings)
