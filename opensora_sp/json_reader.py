"""The one reader of JSON, and of other small files that someone else may have written.

Sizes and nesting are bounded before anything is parsed. A list of empty lists takes 20 times its
bytes in memory, and what is nested too deeply ends in a RecursionError: in the parser, or later
where it is compared, copied or written again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .regular_file import open_regular

MAX_BYTES = 64 << 20
"""Largest JSON file; a feature cache's index may be larger."""

MAX_DEPTH = 100
"""Most brackets that may be open at a time."""

_STRING = re.compile(rb'"[^"]*"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_json(
    path: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """The content of a JSON file in UTF-8.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is larger than ``max_bytes``, nested deeper than ``MAX_DEPTH``, or not
            JSON.
    """
    data = read_small_file(path, max_bytes, "JSON")
    return parse_json(data, str(path), object_hook=object_hook)


def parse_json(
    text: str | bytes,
    source: str,
    *,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Parse JSON.

    Args:
        text: bytes are UTF-8.
        source: where it is from, for errors.
        object_hook: see ``json.loads``.

    Raises:
        ValueError: if it is nested deeper than ``MAX_DEPTH``, or not JSON.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        if _is_deep(text):
            raise ValueError(f"more than {MAX_DEPTH} brackets are open at a time")
        return json.loads(text, object_hook=object_hook)
    except ValueError as error:
        raise ValueError(
            f"got {source}, which is not JSON that can be read ({error}); expected JSON nested at "
            f"most {MAX_DEPTH} deep; correct it, or copy or download it again"
        ) from None


def read_small_file(path: str | Path, max_bytes: int, what: str) -> bytes:
    """The bytes of a file, of which there may be so many.

    Args:
        what: kind of the file, for errors.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is larger.
    """
    data = bytearray()
    with open_regular(path) as file:
        # In parts: a read reserves memory for all that it may return.
        while len(data) <= max_bytes and (part := file.read(1 << 16)):
            data += part
    if len(data) > max_bytes:
        raise ValueError(
            f"got {path} of more than {max_bytes:,} bytes; expected {what} of at most so many; "
            "check that it is the right file, or split it"
        )
    return bytes(data)


def _is_deep(text: str) -> bool:
    # Nearly always, all brackets together are few.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False

    # Without escapes, each string reaches from one quote to the next.
    plain = text.encode(errors="surrogatepass").replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = _STRING.sub(b"", plain).translate(None, _NOT_BRACKETS)
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False
