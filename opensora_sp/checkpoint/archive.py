"""Files of ``torch.save``: names, dtypes, shapes and places of their tensors, without unpickling.

``torch.save`` writes a zip archive: ``data.pkl``, in which a tensor refers to its storage by a key,
and a file ``data/<key>`` of raw bytes for each storage. The bare pickles from before torch 1.6 are
not read.

``_Machine`` executes the operations of a pickle itself. It has only those that build dicts, lists,
tuples, numbers, strings and tensors, and it calls only the functions in ``GLOBALS``, which are all
here. Everything is bounded: bytes, operations, arguments of a call, and what may be hashed. Nothing
is recursive, so nesting costs no more than its operations.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import IO, Any

import torch

from opensora_sp.common.files import open_regular

from .tensor_file import DTYPES

MAX_BYTES = 16 << 20
"""Most bytes of pickles, or of the directory of an archive; a tensor takes about 150."""
MAX_OPERATIONS = 2_000_000
# Bytes that decide what a file is.
MAX_START = 512
MAX_ARGUMENTS = 16
# Larger numbers can be chosen so that they all have the same hash.
MAX_KEY = 1 << 31

BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class RefusedError(Exception):
    """A file is not read. The text follows "got FILE, which" in an error for users."""


@dataclass(frozen=True)
class Storage:
    """The bytes that tensors share, with the dtype that they have in the file."""

    key: str
    dtype: torch.dtype
    num_items: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: a strided view of a storage. ``offset`` is in elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class BoundedFile(io.BufferedReader):
    """A file of which at most ``limit`` bytes are read; seeking is free."""

    def __init__(self, raw: Any, limit: int) -> None:
        super().__init__(raw)
        self.remaining = limit

    def read(self, size: int | None = -1, /) -> bytes:
        most = self.remaining + 1
        content = super().read(most if size is None or size < 0 else min(size, most))
        self.remaining -= len(content)
        if self.remaining < 0:
            raise too_large()
        return content


def too_large() -> RefusedError:
    return RefusedError(
        f"lists more than any model has: over {MAX_BYTES >> 20} MiB or {MAX_OPERATIONS} "
        "operations; expected the names and shapes of a state dict; do not use this file"
    )


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorEntry:
    return TensorEntry(storage, storage.dtype, offset, shape, stride)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorEntry:
    return TensorEntry(storage, dtype, offset, shape, stride)


def _tensor_with_attributes(build: Any, _class: Any, arguments: Any, *_: Any) -> Any:
    # Not this function again: tensors of tensors of tensors would take any time.
    return _called(build if build is not _tensor_with_attributes else None, arguments)


def _first(content: Any = None, *_: Any) -> Any:
    return content


GLOBALS: dict[tuple[str, str], Any] = {
    ("builtins", "set"): _first,
    ("__builtin__", "set"): _first,
    ("collections", "Counter"): _first,
    ("collections", "OrderedDict"): lambda: {},
    ("_codecs", "encode"): _first,
    ("torch", "Size"): _first,
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
    ("torch", "device"): _first,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    **{("torch", name): dtype for name, dtype in BY_NAME.items()},
}
# Operations that push their argument, or something empty. Sets become lists: nothing is hashed.
PUSH = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack, the memo and the operations of a pickle.

    Attributes:
        storages: by key, the ones that tensors refer to.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        # Stacks below marks.
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def load(self, file: IO[bytes]) -> Any:
        """The object of a pickle.

        Raises:
            RefusedError, ValueError, TypeError, LookupError: for anything but plain values.
        """
        for count, (operation, argument, _) in enumerate(genops(file)):
            if count > MAX_OPERATIONS:
                raise too_large()
            if operation.name == "STOP":
                break
            self._execute(operation.name, argument)
        return self.stack.pop()

    def _execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in PUSH:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in CONTAINERS:
            stack.append(CONTAINERS[name]())
        elif name in TUPLES:
            stack[-TUPLES[name] :] = [tuple(stack[-TUPLES[name] :])]
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.below.append(stack)
            self.stack = []
        elif name == "TUPLE":
            above = self._above_mark()
            self.stack.append(tuple(above))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            entries = [stack.pop()] if name == "APPEND" else self._above_mark()
            self._extend(entries)
        elif name in ("SETITEM", "SETITEMS"):
            content = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._above_mark()
            self._set(content[::2], content[1::2])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            names = (stack.pop(-2), stack.pop()) if argument is None else argument.split(" ", 1)
            stack.append(_global(*names))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "BUILD":
            # Attributes of a dict or a tensor, such as the versions of a state dict's modules.
            stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the operation {name}")

    def _above_mark(self) -> list[Any]:
        above, self.stack = self.stack, self.below.pop()
        return above

    def _extend(self, entries: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError(f"entries of {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(entries)

    def _set(self, keys: list[Any], contents: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise TypeError(f"keys of {type(self.stack[-1]).__name__}")
        for key in keys:
            # Others take any time to hash, such as a tuple of pairs of pairs.
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < MAX_KEY):
                raise TypeError(f"a key that is {type(key).__name__}, not a text or a small number")
        self.stack[-1].update(zip(keys, contents, strict=True))

    def _storage(self, reference: Any) -> Storage:
        is_reference = isinstance(reference, tuple) and len(reference) in (5, 6)
        if not is_reference or reference[0] != "storage" or reference[5:] not in ((), (None,)):
            raise ValueError("a reference to something else than a storage")
        _, dtype, key, _, num_items = reference[:5]
        if not (isinstance(key, str) and isinstance(dtype, torch.dtype) and type(num_items) is int):
            raise ValueError("a storage without a dtype, a name or a size")

        self.storages[key] = Storage(key, dtype, num_items)
        return self.storages[key]


def _global(module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name that is no text")
    if (module, name) not in GLOBALS:
        raise RefusedError(
            f"holds more than tensors and plain values ({module}.{name}); expected a state dict; "
            "nothing else is unpickled: save its state dict as safetensors where it was made"
        )
    return GLOBALS[module, name]


def _called(function: Any, arguments: Any) -> Any:
    """Call a function of ``GLOBALS``: nothing else that can be on the stack is callable."""
    if not isinstance(arguments, tuple) or len(arguments) > MAX_ARGUMENTS:
        raise TypeError("a call without a tuple of arguments")
    return function(*arguments)


def other_content(file: Path) -> str | None:
    """A file's content by its first bytes; None for an archive of ``torch.save``.

    Raises:
        OSError: if the file cannot be read, or is no regular file.
    """
    with open_regular(file) as opened:
        start: bytes = opened.read(MAX_START)
    if start[:2] == b"PK":
        return _other_archive(file)
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (git lfs pull in its folder downloads the file itself)"
    if start.startswith(b"\x80"):
        return "a bare pickle, as torch wrote before version 1.6, which is not read"

    if not start:
        return "empty"
    # A character may be cut at the end.
    text = start.decode(errors="ignore")
    is_text = len(text.encode()) > len(start) - 4 and "\0" not in text
    shown = text[:40] if is_text else start[:12]
    return f"{'text' if is_text else 'data of another format'} that begins with {shown!r}"


def _other_archive(file: Path) -> str | None:
    try:
        with open_regular(file, buffering=0) as raw, BoundedFile(raw, MAX_BYTES) as opened:
            names = zipfile.ZipFile(opened).namelist()
    # Damaged bytes can raise whatever the operations of a directory raise.
    except Exception as error:
        return f"a damaged zip archive ({type(error).__name__})"
    is_saved = any(name.partition("/")[2] == "data.pkl" for name in names)
    return None if is_saved else "a zip archive of other files"


def read_archive(file: BoundedFile) -> tuple[Any, dict[str, range]]:
    """The pickled content of a file of ``torch.save``, and the bytes of its storages by key.

    Args:
        file: at its start.

    Returns:
        Nested dicts, lists, tuples, numbers and texts, and ``TensorEntry`` for tensors. Entries and
        ranges are not checked: they may be outside of the file.

    Raises:
        RefusedError: for a larger file, or one that holds anything else.
        Exception: if it is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        # All names begin with the name of the archive.
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "constants.pkl" in members or any(name.startswith("code/") for name in members):
            raise RefusedError(
                "is a TorchScript archive, which holds code; expected a state dict; save the "
                "model's state dict as safetensors where it was made"
            )

        for name, info in members.items():
            # Of a compressed member, some bytes may become any number of bytes.
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        content = _Machine().load(io.BytesIO(archive.read(members["data.pkl"])))

    storages = {}
    for name, info in members.items():
        if name.startswith("data/"):
            start = _data_start(file, info)
            storages[name.removeprefix("data/")] = range(start, start + info.file_size)
    return content, storages


def _data_start(file: BoundedFile, info: zipfile.ZipInfo) -> int:
    """The first byte of an archive's member, after its local header."""
    file.seek(info.header_offset)
    header = file.read(30)
    # The lengths of name and extra field, which may differ from the directory's.
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return info.header_offset + len(header) + sum(lengths)
