"""Names, dtypes, shapes and places of the tensors in a file of ``torch.save``; torch is not used.

``torch.save`` writes a zip archive since torch 1.6: ``data.pkl``, in which a tensor refers to its
storage by a key, and a file ``data/<key>`` of raw bytes for each storage. Before, it wrote several
pickles one after the other, and then the storages. Only names in ``GLOBALS`` are looked up, and all
of them build plain values, so unpickling calls nothing of torch and nothing that the file chooses.
"""

from __future__ import annotations

import os
import pickle
import reprlib
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
# The first two values of a file from before torch 1.6.
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# Wrappers of a state dict in what training programs save.
WRAPPERS = ("state_dict", "model", "module")
# In messages: the path, which this process does not know.
FILE = "{file}"


class RefusedError(Exception):
    """Why a file is not read, for the user; ``FILE`` stands for its path."""


@dataclass(frozen=True)
class DType:
    """A dtype or the class of a storage, of which the file has only the name."""

    name: str


@dataclass(frozen=True)
class Storage:
    """The bytes that tensors share, with the dtype that they have in the file."""

    key: str
    dtype: str
    num_items: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: a strided view of a storage. ``offset`` is in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorEntry:
    return TensorEntry(storage, storage.dtype, offset, tuple(shape), tuple(stride))


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorEntry:
    return TensorEntry(storage, dtype.name, offset, tuple(shape), tuple(stride))


def _tensor_with_attributes(build: Any, _class: Any, arguments: Any, *_: Any) -> Any:
    return build(*arguments)


def _first(value: Any, *_: Any) -> Any:
    return value


GLOBALS: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("collections", "Counter"): Counter,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _first,
    ("torch", "Size"): tuple,
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
    ("torch", "device"): _first,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch.storage", "UntypedStorage"): DType("uint8"),
    **{("torch", name): DType(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): DType(name) for name in ITEM_SIZES},
}


class Unpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, strings and ``TensorEntry``; refuses all else.

    ``storages`` has those that tensors refer to, by key.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in GLOBALS:
            raise RefusedError(
                f"got {FILE}, which holds more than tensors and plain values ({module}.{name}); "
                "expected a state dict; nothing else is unpickled: save its state dict as "
                "safetensors where it was made"
            )
        return GLOBALS[module, name]

    def persistent_load(self, reference: Any) -> Storage:
        kind, storage_class, key, _, num_items, *view = reference
        if kind != "storage" or any(part is not None for part in view):
            raise pickle.UnpicklingError(f"a reference to {shown(kind)}")

        self.storages[key] = Storage(key, storage_class.name, num_items)
        return self.storages[key]


def read_table(file: IO[bytes], *, ema: bool) -> dict[str, Any]:
    """The tensors of the state dict in a file, and notes on where in it they were.

    Args:
        file: seekable, at its start.
        ema: prefer the EMA weights of a file that holds both.

    Returns:
        "tensors", by name with "dtype", "shape", "stride" in elements and "start", the first byte
        in the file; and "notes". All of it can be written as JSON.

    Raises:
        RefusedError: if the file is damaged or holds anything but a state dict.
    """
    try:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        content, starts = _read_zip(file) if is_zip else _read_legacy(file)
        state, notes = _unwrap(content, ema=ema)
        tensors = {name: _row(entry, starts) for name, entry in state.items()}
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError(
            f"got {FILE}, whose names and shapes do not fit into memory; expected weights; do not "
            "use it"
        ) from None
    # Pickled bytes can raise whatever the operations of plain values raise.
    except Exception as error:
        raise RefusedError(
            f"got {FILE}, which cannot be read ({type(error).__name__}: {error!s:.200}); expected "
            "weights saved by torch or safetensors; copy or download it again"
        ) from None
    return {"tensors": tensors, "notes": notes}


def _read_zip(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    """The pickled content of an archive, and the first byte of each storage."""
    with zipfile.ZipFile(file) as archive:
        # All names begin with the name of the archive.
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "constants.pkl" in members or any(name.startswith("code/") for name in members):
            raise RefusedError(
                f"got {FILE}, a TorchScript archive, which holds code; expected a state dict; save "
                "the model's state dict as safetensors where it was made"
            )
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")

        with archive.open(members["data.pkl"]) as pickled:
            content = Unpickler(pickled).load()

    starts = {}
    for name, info in members.items():
        if name.startswith("data/"):
            starts[name.removeprefix("data/")] = _data_start(file, info)
    return content, starts


def _data_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """The first byte of an archive's member, after its local header."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")

    file.seek(info.header_offset)
    header = file.read(30)
    # The lengths of name and extra field, which may differ from those of the directory.
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return info.header_offset + len(header) + sum(lengths)


def _read_legacy(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    """As ``_read_zip``, for a file from before torch 1.6."""
    magic, protocol, system = (Unpickler(file).load() for _ in range(3))
    if (magic, protocol) != (MAGIC, PROTOCOL) or not system["little_endian"]:
        raise ValueError("it does not begin as a file of torch.save")

    unpickler = Unpickler(file)
    content = unpickler.load()

    # Each storage is preceded by its number of elements.
    starts = {}
    for key in Unpickler(file).load():
        num_items = int.from_bytes(file.read(8), "little")
        starts[key] = file.seek(0, os.SEEK_CUR)
        file.seek(num_items * ITEM_SIZES[unpickler.storages[key].dtype], os.SEEK_CUR)
    return content, starts


def _unwrap(content: Any, *, ema: bool) -> tuple[dict[str, TensorEntry], list[str]]:
    """The state dict in what was unpickled, and notes on the keys that led to it."""
    notes: list[str] = []
    order = ("ema", *WRAPPERS) if ema else (*WRAPPERS, "ema")
    while isinstance(content, Mapping) and not _holds_tensors(content):
        key = next((key for key in order if isinstance(content.get(key), Mapping)), None)
        if key is None:
            break
        notes.append(f"took {key!r} of the keys {shown(list(content))}")
        content = content[key]

    problem = _not_a_state_dict(content)
    if problem is not None:
        raise RefusedError(
            f"got {FILE}, which holds {problem}; expected a state dict, by itself or under one of "
            f"{list(order)}; save the model's state dict"
        )
    return dict(content), notes


def shown(value: Any) -> str:
    """The beginning of a value as text, made without the rest, which can be of any size."""
    return reprlib.repr(value)[:100]


def _holds_tensors(mapping: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, TensorEntry) for value in mapping.values())


def _not_a_state_dict(content: Any) -> str | None:
    """Why an object is not a state dict; None if it is one."""
    is_mapping = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not is_mapping or not content:
        return f"{type(content).__name__} {shown(content)}"

    others = (name for name, value in content.items() if not isinstance(value, TensorEntry))
    name = next(others, None)
    return None if name is None else f"{shown(content[name])} under {shown(name)}"


def _row(entry: TensorEntry, starts: Mapping[str, int]) -> dict[str, Any]:
    """A tensor as JSON: its first byte in the file replaces storage and offset."""
    start = starts[entry.storage.key] + entry.offset * ITEM_SIZES[entry.dtype]
    return {
        "dtype": entry.dtype,
        "shape": [int(size) for size in entry.shape],
        "stride": [int(step) for step in entry.stride],
        "start": int(start),
    }
