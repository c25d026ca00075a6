"""The process that reads a pickled file: stdin is the file, stdout takes one object of JSON."""

from __future__ import annotations

import codecs
import json
import os
import sys
from typing import Any

from .archive import RefusedError, read_table
from .confinement import confine

MAX_MEMORY, MAX_CPU_SECONDS = 1 << 30, 60


def main() -> None:
    """Read the table of the tensors in the file; ``sys.argv`` ends with "ema" for EMA weights."""
    # Modules that Python would import on first use. Afterwards nothing can be opened.
    for encoding in ("ascii", "cp437", "latin-1", "utf-8"):
        codecs.lookup(encoding)

    answer: dict[str, Any]
    try:
        confine(memory=MAX_MEMORY, seconds=MAX_CPU_SECONDS)
        answer = read_table(sys.stdin.buffer, ema=sys.argv[-1] == "ema")
    except RefusedError as error:
        answer = {"refused": str(error)}
    except (OSError, ValueError) as error:
        answer = {"not confined": str(error)}

    sys.stdout.buffer.write(json.dumps(answer).encode())
    sys.stdout.buffer.flush()
    os._exit(0)
