"""Pickled weights: tensors mapped from files of ``torch.save``, without ``torch.load``.

``torch.save`` writes a zip archive: ``data.pkl``, in which a tensor refers to its storage by a key,
and a file ``data/<key>`` of raw bytes for each storage. The bare pickles from before torch 1.6 are
not read.

A pickle can run code as it is read, and so can a TorchScript archive of the same name. With
``weights_only=True``, ``torch.load`` executed code until torch 2.6 (CVE-2025-32434) and wrote
outside of its memory until 2.10 (CVE-2026-24747). It also bounds neither time nor memory: keys that
take days to hash, and copies of copies. So Python's own unpickler runs here with the few operations
of plain values, and calls only the functions in ``GLOBALS``, which are all here. Nothing is
recursive. Torch checks that each tensor lies within its storage.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import warnings
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from opensora_sp.common.files import open_regular

from .tensor_file import DTYPES

MAX_BYTES = 8 << 20
"""Most bytes of pickles and of the directory of an archive; a tensor takes about 250 in both."""
# Bytes that decide what a file is.
MAX_START = 512
MAX_ARGUMENTS = 16
# A dict takes one byte of a pickle and 90 of memory, a tensor 3 and 1,000. A tensor that torch
# saved takes about 60 of these steps, of which a call counts as several.
MAX_STEPS, STEPS_OF_CALL = 1 << 21, 8
# Larger numbers can be chosen so that they all have the same hash.
MAX_KEY = 1 << 31
MAX_MESSAGE = 1000
# Bytes of tensors per byte of the file: tied weights are listed under each of their names, and many
# names of the same bytes would let a small file fill a disk.
MAX_ALIASES = 8
# Of torch's tensors.
MAX_DIMS = 64
# Wrappers of a state dict in what training programs save, one within the other.
WRAPPERS, MAX_WRAPPERS = ("state_dict", "model", "module"), 8

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
}


class RefusedError(Exception):
    """A file is not read. The text follows "got FILE, which" in an error for users."""


class BoundedFile(io.BufferedReader):
    """A file of which at most ``MAX_BYTES`` are read; seeking is free."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self.remaining = MAX_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        most = self.remaining + 1
        content = super().read(most if size is None or size < 0 else min(size, most))
        self.remaining -= len(content)
        if self.remaining < 0:
            raise RefusedError(
                f"lists more than any model has: over {MAX_BYTES >> 20} MiB; expected the names "
                "and shapes of a state dict; do not use this file"
            )
        return content


def _view(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """A tensor of the file. Torch refuses what is outside of the storage."""
    are_tuples = isinstance(shape, tuple) and isinstance(stride, tuple)
    if not are_tuples or max(len(shape), len(stride)) > MAX_DIMS:
        raise TypeError(f"no shape and stride of at most {MAX_DIMS} dimensions")
    view: Tensor = storage.as_strided(shape, stride, offset)
    return view


def _view_of_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    # Torch takes a shape as well, of any length.
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype of a tensor")
    return _view(storage.view(dtype), offset, shape, stride)


def _first(content: Any = None, *_: Any) -> Any:
    return content


def _empty_dict() -> dict[str, Any]:
    return {}


GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "Counter"): _first,
    ("collections", "OrderedDict"): _empty_dict,
    ("_codecs", "encode"): _first,
    ("torch", "Size"): _first,
    ("torch", "device"): _first,
    ("torch._utils", "_rebuild_tensor"): _view,
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_tensor_v3"): _view_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in (STORAGES | BY_NAME).items()},
}
# None of these makes a set, another object than of GLOBALS, or hashes anything.
OPERATIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINSTRING, pickle.SHORT_BINSTRING,
    pickle.BINBYTES, pickle.SHORT_BINBYTES,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
    pickle.GLOBAL, pickle.STACK_GLOBAL,
)  # fmt: skip


def _counted(operation: Callable[[Any], None], steps: int) -> Callable[[Any], None]:
    """An operation that takes steps from those that are left of a pickle."""

    def count_and_run(unpickler: Any) -> None:
        unpickler.steps_left -= steps
        if unpickler.steps_left < 0:
            raise RefusedError(
                f"takes more than {MAX_STEPS} steps to read; expected the names and shapes of a "
                "state dict; do not use this file"
            )
        operation(unpickler)

    return count_and_run


# The unpickler in Python, whose operations can be replaced; the one in C is another class.
class _Unpickler(pickle._Unpickler):
    """The plain values of a pickle, and its tensors as views of the file.

    Args:
        content: the pickle.
        mapped: the whole file.
        places: the first byte and the number of bytes of each storage, by key.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: _counted(pickle._Unpickler.dispatch[code[0]], 1) for code in OPERATIONS
    }

    def __init__(
        self, content: bytes, mapped: mmap.mmap, places: dict[str, tuple[int, int]]
    ) -> None:
        super().__init__(io.BytesIO(content), encoding="latin-1")
        self.mapped, self.places = mapped, places
        self.steps_left = MAX_STEPS

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise RefusedError(
                f"holds more than tensors and plain values ({module}.{name}); expected a state "
                "dict; nothing else is unpickled: save its state dict as safetensors where it was "
                "made"
            )
        return GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> Tensor:
        """The numbers of a storage, as a tensor of one dimension."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6):
            raise TypeError("a reference to something else than a storage")
        _, dtype, key, _, num_items = pid[:5]
        if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
            raise TypeError("a storage without a dtype or a name")
        if type(num_items) is not int or num_items < 0:
            raise TypeError("a storage without a length")
        if num_items == 0:
            return torch.empty(0, dtype=dtype)
        start, size = self.places[key]
        # Torch takes a length that overflows, and the bytes of what follows in the file.
        if num_items * dtype.itemsize > size:
            raise ValueError("a storage that is longer than its bytes in the file")
        return torch.frombuffer(self.mapped, dtype=dtype, count=num_items, offset=start)

    def load_reduce(self) -> None:
        """Call a function of ``GLOBALS``: nothing else that can be on the stack is callable."""
        arguments = self.stack.pop()
        if not isinstance(arguments, tuple) or len(arguments) > MAX_ARGUMENTS:
            raise TypeError("a call without a tuple of arguments")
        self.stack.append(self.stack.pop()(*arguments))

    def load_build(self) -> None:
        """Leave out attributes of a dict, such as the versions of a state dict's modules."""
        self.stack.pop()

    def load_setitem(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, content: list[Any]) -> None:
        keys = content[::2]
        for key in keys:
            # Others take any time to hash, such as a tuple of pairs of pairs.
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < MAX_KEY):
                raise TypeError(f"a key that is {type(key).__name__}, not a text or a small number")
        if not isinstance(self.stack[-1], dict):
            raise TypeError(f"keys of {type(self.stack[-1]).__name__}")
        self.stack[-1].update(zip(keys, content[1::2], strict=True))

    dispatch[pickle.REDUCE[0]] = _counted(load_reduce, STEPS_OF_CALL)
    dispatch[pickle.BINPERSID[0]] = _counted(
        pickle._Unpickler.dispatch[pickle.BINPERSID[0]], STEPS_OF_CALL
    )
    dispatch[pickle.BUILD[0]] = _counted(load_build, 1)
    dispatch[pickle.SETITEM[0]] = _counted(load_setitem, 1)
    dispatch[pickle.SETITEMS[0]] = _counted(load_setitems, 1)


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
    return f"data of another format that begins with {start[:40]!r}" if start else "empty"


def _other_archive(file: Path) -> str | None:
    try:
        with open_regular(file, buffering=0) as raw, BoundedFile(raw) as opened:
            names = zipfile.ZipFile(opened).namelist()
    # Damaged bytes can raise whatever the operations of a directory raise.
    except Exception as error:
        return f"a damaged zip archive ({type(error).__name__})"
    is_saved = any(name.partition("/")[2] == "data.pkl" for name in names)
    return None if is_saved else "a zip archive of other files"


def open_pickle(file: Path, *, ema: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of the state dict in a file of ``torch.save``, and notes on where it was.

    Args:
        ema: prefer the EMA weights of a file that holds both.

    Returns:
        Tensors that are mapped, to be read only, and the notes.

    Raises:
        ValueError: if the file is damaged, holds anything but a state dict, lists more than any
            model has, or cannot be mapped.
    """
    mapped = _map(file)
    try:
        with open_regular(file, buffering=0) as raw, BoundedFile(raw) as opened:
            content, places = _read_archive(opened)
        with warnings.catch_warnings():
            # Of writing to a tensor of the file, which would end the process. Readers copy.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            saved = _Unpickler(content, mapped, places).load()
        tensors, notes = _unwrap(saved, ema=ema)
    except (RefusedError, MemoryError) as error:
        reason = str(error) or "does not fit into memory; expected weights; do not use this file"
        raise ValueError(f"got {file}, which {_printable(reason)}") from None
    # Damaged bytes can raise whatever the operations of plain values raise.
    except Exception as error:
        raise ValueError(
            f"got {file}, which cannot be read ({type(error).__name__}: {_printable(error)}); "
            "expected weights saved by torch or safetensors; copy or download it again"
        ) from None

    total = sum(math.prod(tensor.shape) * tensor.itemsize for tensor in tensors.values())
    if total > MAX_ALIASES * len(mapped):
        raise ValueError(
            f"got {file} of {len(mapped)} bytes, which lists {len(tensors)} tensors of {total} "
            f"bytes; expected weights tied at most {MAX_ALIASES} times on average; do not use this "
            "file"
        )
    return tensors, notes


def _map(file: Path) -> mmap.mmap:
    """The bytes of a file, mapped to be read only: the kernel reserves no memory for copies.

    Raises:
        ValueError: if it cannot be mapped.
    """
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"got {file}, which cannot be mapped into memory ({error}); expected a file on storage "
            "that allows it, and address space for all of it; copy it to a local disk, or raise "
            "`ulimit -v`"
        ) from None


def _read_archive(file: BoundedFile) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The pickle of an archive, and the first byte and size of each storage by key.

    Raises:
        RefusedError: for a larger file.
        Exception: if it is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        # All names begin with the name of the archive.
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for name, info in members.items():
            if name.startswith("code/"):
                raise RefusedError(
                    "is a TorchScript archive, which holds code; expected a state dict; save the "
                    "model's state dict as safetensors where it was made"
                )
            # Of a compressed member, some bytes may become any number of bytes.
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        content = archive.read(members["data.pkl"])

    places = {}
    for name, info in members.items():
        file.seek(info.header_offset)
        header = file.read(30)
        # The lengths of name and extra field, which may differ from the directory's.
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = info.header_offset + len(header) + sum(lengths)
        places[name.removeprefix("data/")] = start, info.file_size
    return content, places


def _unwrap(content: Any, *, ema: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in the content of a file, and notes on the keys that led to it."""
    notes: list[str] = []
    order = ("ema", *WRAPPERS) if ema else (*WRAPPERS, "ema")
    while isinstance(content, dict):
        key = next((key for key in order if isinstance(content.get(key), dict)), None)
        # A dict may be within itself.
        if key is None or len(notes) == MAX_WRAPPERS:
            break
        # There can be any number of keys, of any length.
        keys = [key if isinstance(key, int) else key[:60] for key in islice(content, 6)]
        notes.append(_printable(f"took {key!r} of the keys {keys}"))
        content = content[key]

    problem = _not_a_state_dict(content)
    if problem is not None:
        raise RefusedError(
            f"holds {problem}; expected a state dict, by itself or under one of {list(order)}; "
            "save the model's state dict"
        )
    return content, tuple(notes)


def _not_a_state_dict(content: Any) -> str | None:
    """Reason why content is no state dict; None if it is one."""
    if not isinstance(content, dict) or not content:
        return f"{type(content).__name__} without tensors"

    for name, entry in content.items():
        # Not the entry itself: content can have a text of any length.
        if not isinstance(entry, Tensor) or not isinstance(name, str):
            return f"{type(entry).__name__} under {str(name)[:60]!r}"
        # Errors about a model name its tensors, and codes would control the terminal.
        if not name.isprintable():
            return f"a tensor under {name[:60]!r}"
    return None


def _printable(text: Any) -> str:
    """A text of the file, for the log: short, and without codes that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:MAX_MESSAGE])
