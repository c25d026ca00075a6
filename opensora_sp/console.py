"""What the scripts share: errors told as sentences, and the command line they take."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of shells: 128 and the number of SIGINT."""
PATIENCE = 20.0  # seconds that ranks take at most to exit after an error
OF_RANK = {"of_rank": True}
"""``extra=`` of a warning about what this rank alone has seen: it is shown by ranks other than the first, too."""


@contextmanager
def told_errors() -> Iterator[None]:
    """Print a user's error (ValueError) as one message, without a traceback, and exit with status 2.

    Of the ranks of a host, the first to fail prints: launchers stop the others as soon as one has exited, so none of
    them can wait for another to speak. An error that is in the log already is not printed again. Ctrl-C ends the
    process with status 130.
    """
    try:
        yield
    except ValueError as error:
        is_first = tell_launcher(str(error))
        if is_first and not getattr(error, "is_logged", False):
            rank = os.environ.get("RANK")
            print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        if not is_first:
            _leave_after_the_first()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def tell_launcher(reason: str) -> bool:
    """Give ``torchrun`` the reason why this process will fail; returns whether it is the first of its host to do so.

    The last lines of torchrun are the reason that was given first. Without torchrun, every process is the first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return True

    marker = _marker(file)
    is_first = marker is None or _claim(marker)
    # A file that cannot be written must not take the place of the reason.
    with suppress(OSError):
        if not os.path.exists(file):
            timestamp = int(time.time()) + (not is_first)
            Path(file).write_text(json.dumps({"message": reason, "timestamp": timestamp}))
    return is_first


def _marker(file: str) -> Path | None:
    """A link to the process number of the first rank of this host that fails, in torchrun's folder of the attempt.

    Only torchrun makes a folder for each attempt, and in it one for each rank: elsewhere there is no marker, which
    would outlive the run.
    """
    folder = Path(file).parent.parent
    return folder / "first_to_fail" if folder.name.startswith("attempt_") else None


def _claim(marker: Path) -> bool:
    """Set the marker if nobody has; returns whether it is this process's. Where none can be set, each is the first."""
    mine = str(os.getpid())
    try:
        if _is_stale(marker):
            marker.unlink(missing_ok=True)

        # A link, since it has its content from the moment on at which others can see it.
        os.symlink(mine, marker)
        return True
    except FileExistsError:
        return _pid_in(marker) in (mine, "")
    except OSError:
        return True


def _is_stale(marker: Path) -> bool:
    """Whether an earlier run has left the marker: its process has ended, and did so before this one began."""
    pid = _pid_in(marker)
    if not pid or _is_running(pid):
        return False
    import psutil  # not needed before a run fails

    return marker.lstat().st_mtime < psutil.Process().create_time()


def _pid_in(marker: Path) -> str:
    """The process number that a marker has; nothing if it cannot be read."""
    try:
        return os.readlink(marker)
    except OSError:
        return ""


def _is_running(pid: str) -> bool:
    """Whether the process has not exited; a launcher that is busy may leave it as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _leave_after_the_first() -> None:
    """Let the first rank of this host that fails be the first to exit: torchrun then ends the others by SIGTERM, and
    its report has that failure alone."""
    marker = _marker(os.environ["TORCHELASTIC_ERROR_FILE"])
    pid = "" if marker is None else _pid_in(marker)
    deadline = time.monotonic() + PATIENCE
    while pid and _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # for SIGTERM


def exit_interrupted(reason: str) -> NoReturn:
    """Exit with status 130 after Ctrl-C. All ranks of a host have the same reason, and the launcher reports it once."""
    if not tell_launcher(reason):
        _leave_after_the_first()
    sys.exit(INTERRUPTED)


def interrupts_end_at_once() -> None:
    """Let Ctrl-C end this process without a traceback, until a run handles it (see ``watch``).

    For scripts, before they import what takes seconds. Where SIGINT is ignored, as under ``nohup`` by some shells, it
    stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Parser(argparse.ArgumentParser):
    """Says of arguments left over what may have torn them off."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += (
                " (if they are the rest of a text with spaces: colossalai run passes options on without quotes; start "
                "with torchrun, or write the text into a config file)"
            )
        super().error(message)


def truth(text: str) -> bool:
    """What a word on the command line says: true, yes, on, 1, or false, no, off, 0.

    Raises:
        argparse.ArgumentTypeError: for another word.
    """
    words = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
        ("false", "no", "off", "0"), False
    )
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected True or False; write one of them")
    return words[text.lower()]


def config_arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two arguments that every script takes."""
    parser = Parser(description=description)
    parser.add_argument("config", help="mmengine-style .py config")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override config values, for example sp_size=4 optimizer.lr=1e-5; values are Python literals or text",
    )
    return parser


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """The option that lets pickled weights be read."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="also read pickled weights (.pt, .pth, .bin), which can run code: only from a source that you trust",
    )


def only_of_this_rank(record: logging.LogRecord) -> bool:
    """What ranks other than the first show: errors, and what no other rank reports."""
    return record.levelno >= logging.ERROR or getattr(record, "of_rank", False)


def log_to_terminal() -> None:
    """Show what the package logs; of ranks other than the first, only what no other rank reports."""
    package, is_main = logging.getLogger("opensora_sp"), os.environ.get("RANK", "0") == "0"
    package.setLevel(logging.INFO if is_main else logging.WARNING)
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        if not is_main:
            handler.addFilter(only_of_this_rank)
        package.addHandler(handler)
