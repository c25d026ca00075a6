"""Shared by the commands: reports of errors, handling of Ctrl-C, command-line options, and logging.

Imports nothing slow: scripts handle Ctrl-C before they import torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .error_file import wait_for_first_failure, write_error_file

LOGGER = logging.getLogger("opensora_sp")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of shells: 128 and the number of SIGINT."""
RANK_LOCAL = {"is_rank_local": True}
"""``extra=`` of a record that only this rank logs, so that ranks other than 0 show it as well."""
# Set once this process exits: code that runs at its end cannot ask Python for it.
exit_status: int | None = None
CONFIG_HELP = (
    "config file, Python in mmengine's style; the package's, configs/..., are found in every folder"
)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print a user's error (ValueError) as one message without a traceback; exit with status 2.

    Of the ranks of a host, only the first to fail prints. Launchers stop the others as soon as one
    has exited, so no rank can wait for another to print. An error that the log has already is not
    printed again. Ctrl-C ends the process with status 130.
    """
    global exit_status
    try:
        with _reported_once():
            yield
    except SystemExit as end:
        exit_status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


@contextmanager
def _reported_once() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        is_first = write_error_file(str(error))
        if not is_first:
            wait_for_first_failure()
        elif not getattr(error, "is_logged", False):
            rank = os.environ.get("RANK")
            print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def exit_interrupted(reason: str) -> NoReturn:
    """Exit with status 130 after Ctrl-C; all ranks call it, and the launcher reports it once."""
    if not write_error_file(reason):
        wait_for_first_failure()
    sys.exit(INTERRUPTED)


def exit_on_interrupt() -> None:
    """Let Ctrl-C end this process without a traceback, until a ``Watchdog`` handles it.

    For scripts, before they import what takes seconds. Where SIGINT is ignored, as some shells do
    under ``nohup``, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Parser(argparse.ArgumentParser):
    """An argument parser that explains the likely cause of unrecognized arguments."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += (
                " (if they are the rest of a text with spaces: colossalai run passes options on "
                "without quotes; start with torchrun, or write the text into a config file)"
            )
        super().error(message)


def config_arguments(*, needs_config: bool = True, instead: str = "") -> argparse.ArgumentParser:
    """A parser with the two arguments that every script takes: the config, and overrides of it.

    Args:
        instead: what a command takes in place of a config, for its help.
    """
    parser = Parser()
    number = None if needs_config else "?"
    parser.add_argument("config", nargs=number, help=CONFIG_HELP + instead)
    add_cfg_options(parser)
    return parser


def add_cfg_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that overrides values of the config."""
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override config values, for example sp_size=4 optimizer.lr=1e-5; values are Python "
        "literals or text",
    )


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """Add the option that allows pickled weights."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="also read pickled weights (.pt, .pth, .bin): names, shapes and bytes of tensors; "
        "nothing in them is executed",
    )


def is_shown_on_all_ranks(record: logging.LogRecord) -> bool:
    """True if ranks other than 0 show a record: errors, and what only this rank logs."""
    return record.levelno >= logging.ERROR or getattr(record, "is_rank_local", False)


def log_to_terminal() -> None:
    """Show the package's log on the terminal: of rank 0 all, of others what only they log."""
    if not LOGGER.handlers:
        is_main = os.environ.get("RANK", "0") == "0"
        add_log_handler(logging.StreamHandler(), "%(message)s", is_main=is_main)


def add_log_handler(handler: logging.Handler, form: str, *, is_main: bool) -> None:
    """Add a handler to the package's log; it handles everything where ``is_main``."""
    LOGGER.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
    if not is_main:
        handler.addFilter(is_shown_on_all_ranks)
    LOGGER.addHandler(handler)
