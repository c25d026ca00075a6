"""What the scripts share: errors told as sentences, and the command line they take."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_errors() -> Iterator[None]:
    """Print a user's error (ValueError) as one message, without a traceback, and exit with status 2.

    Every rank prints its own: launchers stop the others as soon as one has exited, so none can speak for all.
    """
    try:
        yield
    except ValueError as error:
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def show_log() -> None:
    """Send the package's log to the terminal, of the first process; of the others errors alone."""
    log = logging.getLogger("opensora_sp")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    log.propagate = False


def config_arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two arguments that every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", help="mmengine-style .py config")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override config values, for example sp_size=4 optimizer.lr=1e-5; values are Python literals or text",
    )
    return parser
