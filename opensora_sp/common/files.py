"""Bounded reading of small files that someone else may have written, atomic writing, shipped files.

Sizes and nesting of JSON are bounded before anything is parsed: a list of empty lists takes 20
times its bytes in memory, and JSON that is nested too deeply ends in a RecursionError, in the
parser or later where it is compared, copied or written again. Only regular files are opened,
without waiting. A path under ``configs/`` works in every folder: where there is no such file, the
file of the package is taken (``opensora_sp/configs`` is a link in the repository, and a folder in
a wheel). Models of the package have a name instead.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .importing import nearest


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Like ``open(path, mode, **options)`` to read, for regular files only.

    A plain ``open`` of a named pipe waits until another process opens it to write.

    Raises:
        OSError: if the file cannot be opened, or is a named pipe, a device, a socket or a folder.
    """
    return open(path, mode, opener=_open_regular, **options)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    # Of what was opened, not of the path: that may name something else by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a named pipe, a device or a folder, not a file", path)

    os.set_blocking(descriptor, True)
    return descriptor


MAX_BYTES = 64 << 20
"""Largest JSON file."""

MAX_DEPTH = 100
"""Most brackets that may be open at a time."""

_STRING = re.compile(rb'"[^"]*"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_json(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """The content of a JSON file in UTF-8.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is larger than ``max_bytes``, nested deeper than ``MAX_DEPTH``, or not
            JSON.
    """
    return parse_json(read_small_file(path, max_bytes, "JSON"), str(path))


def parse_json(
    text: str | bytes,
    source: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON.

    Args:
        text: bytes are UTF-8.
        source: where it is from, for errors.
        object_pairs_hook: see ``json.loads``.

    Raises:
        ValueError: if it is nested deeper than ``MAX_DEPTH``, or not JSON.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        if _is_deep(text):
            raise ValueError(f"more than {MAX_DEPTH} brackets are open at a time")
        return json.loads(text, object_pairs_hook=object_pairs_hook)
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
    content = bytearray()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # In parts: a read reserves memory for all that it may return.
        while max(size, len(content)) <= max_bytes and (part := file.read(1 << 16)):
            content += part
    if max(size, len(content)) > max_bytes:
        raise ValueError(
            f"got {path} of more than {max_bytes:,} bytes; expected {what} of at most so many; "
            "check that it is the right file, or split it"
        )
    return bytes(content)


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


logger = logging.getLogger(__name__)
FOLDER = "configs"
SHIPPED = Path(__file__).parent.parent / FOLDER


def or_shipped(path: str | Path) -> Path:
    """A path as it is if it exists, else of the package's file of this name if there is one.

    Logs which file is taken from the package.
    """
    path = Path(path)
    shipped = SHIPPED.joinpath(*path.parts[1:])
    if path.exists() or path.parts[:1] != (FOLDER,) or not shipped.is_file():
        return path

    logger.info("%s is not in this folder; taken from the package: %s", path, shipped)
    return shipped


def shipped_name(path: Path) -> str:
    """``configs/...``, under which ``or_shipped`` finds a file of the package."""
    return f"{FOLDER}/{path.relative_to(SHIPPED).as_posix()}"


def shipped_models() -> list[Path]:
    """Folders of the package's models: weights, and ``sample.py`` to sample from them."""
    configs = Path(__file__).resolve().parents[1].glob("shipped_models/*/sample.py")
    return sorted(config.parent for config in configs)


def shipped_model(name: str) -> Path | None:
    """Folder of the package's model ``name``; None for the path of a file.

    Raises:
        ValueError: if ``name`` is neither.
    """
    models = {folder.name: folder for folder in shipped_models()}
    path = Path(name)
    is_other = path.is_dir() or len(path.parts) == 1
    if name in models or path.is_file() or path.suffix or not is_other:
        return models.get(name)

    config = path / "sample.py"
    raise ValueError(
        f"got {name!r}, which is neither a file nor a model of the package; expected "
        f"{config if config.is_file() else 'a .py config'} (with --ckpt PATH), or one of "
        f"{', '.join(models)}; {nearest(name, models)}"
    )


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the partial path to write to. It replaces ``path`` on success and is removed on error.

    Partial files are hidden and keep the suffix, which decides on formats.
    """
    # By process, so that two of them do not write one file.
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(folder: Path, name: str = "outputs") -> None:
    """Raise ValueError if files cannot be written in a folder, which need not exist yet.

    Args:
        name: of the option that sets the folder, for errors.
    """
    existing = folder.absolute()
    # A link that leads nowhere exists as well: no folder can be made in its place.
    while not os.path.lexists(existing):
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(
            f"got {name} {str(folder)!r}, but {existing} is no folder that can be written; "
            f"expected one; set {name} to another folder"
        )
