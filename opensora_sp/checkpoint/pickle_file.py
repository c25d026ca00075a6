"""Pickled weights: tensors mapped from files of ``torch.save``, which torch itself never reads.

A pickle can run code as it is read, and so can a TorchScript archive of the same name. With
``weights_only=True``, ``torch.load`` executed code until torch 2.6 (CVE-2025-32434) and wrote
outside of its memory until 2.10 (CVE-2026-24747). ``archive`` lists where in the file each tensor
is. The list is not trusted: each tensor must lie within its storage, and that within the file.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.files import open_regular

from .archive import MAX_BYTES, BoundedFile, RefusedError, Storage, TensorEntry, read_archive

MAX_MESSAGE = 1000
# Bytes of tensors per byte of the file: tied weights are listed under each of their names, and many
# names of the same bytes would let a small file fill a disk.
MAX_ALIASES = 8
# Of torch's tensors.
MAX_DIMS = 64
# Wrappers of a state dict in what training programs save, one within the other.
WRAPPERS, MAX_WRAPPERS = ("state_dict", "model", "module"), 8


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file.

    Args:
        file: bytes of the whole file, mapped.
        start: its first byte.
        stride: in elements.
    """

    file: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def read(self) -> Tensor:
        """A view of the mapped file; a copy where the file does not align it."""
        content = self.file[self.start : self.start + self.num_bytes]
        if self.start % self.dtype.itemsize:
            content = content.clone()
        return content.view(self.dtype).as_strided(self.shape, self.stride)

    @property
    def num_bytes(self) -> int:
        """Length of the bytes from the first element to the last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def open_pickle(file: Path, *, ema: bool) -> tuple[dict[str, MappedTensor], tuple[str, ...]]:
    """The tensors of the state dict in a file of ``torch.save``, and notes on where it was.

    Args:
        ema: prefer the EMA weights of a file that holds both.

    Raises:
        ValueError: if the file is damaged, holds anything but a state dict, lists more than any
            model has, or cannot be mapped.
    """
    try:
        with open_regular(file, buffering=0) as raw, BoundedFile(raw, MAX_BYTES) as opened:
            content, storages = read_archive(opened)
        state, notes = _unwrap(content, ema=ema)
    except (RefusedError, MemoryError) as error:
        reason = str(error) or "does not fit into memory; expected weights; do not use this file"
        raise ValueError(f"got {file}, which {_printable(reason)}") from None
    # Damaged bytes can raise whatever the operations of plain values raise.
    except Exception as error:
        raise ValueError(
            f"got {file}, which cannot be read ({type(error).__name__}: {_printable(error)}); "
            "expected weights saved by torch or safetensors; copy or download it again"
        ) from None

    mapped = _map(file)
    try:
        tensors = {name: _tensor(mapped, entry, storages) for name, entry in state.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"got {file}, which lists tensors that are not in it ({_printable(error)}); expected "
            "weights saved by torch; copy or download it again"
        ) from None

    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if total > MAX_ALIASES * len(mapped):
        raise ValueError(
            f"got {file} of {len(mapped)} bytes, which lists {len(tensors)} tensors of {total} "
            f"bytes; expected weights tied at most {MAX_ALIASES} times on average; do not use this "
            "file"
        )
    return tensors, notes


def _unwrap(content: Any, *, ema: bool) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
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

    others = (name for name, entry in content.items() if not isinstance(entry, TensorEntry))
    name = next(others, None)
    if name is not None:
        return f"{_shown(content[name])} under {_shown(name)}"
    return None if all(isinstance(name, str) for name in content) else "tensors without names"


def _shown(content: Any) -> str:
    """A number or the beginning of a text; the type of anything else, which has any length."""
    if isinstance(content, str):
        return repr(content[:60])
    return repr(content) if isinstance(content, int | float) else type(content).__name__


def _map(file: Path) -> Tensor:
    """The bytes of a file, mapped to be read only: the kernel reserves no memory for copies.

    Raises:
        ValueError: if it cannot be mapped.
    """
    try:
        with file.open("rb") as opened, warnings.catch_warnings():
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            # Of writing to such a tensor, which would end the process. Readers copy.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(mapped, dtype=torch.uint8)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"got {file}, which cannot be mapped into memory ({error}); expected a file on storage "
            "that allows it, and address space for all of it; copy it to a local disk, or raise "
            "`ulimit -v`"
        ) from None


def _printable(text: Any) -> str:
    """A text of the file, for the log: short, and without codes that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:MAX_MESSAGE])


def _tensor(file: Tensor, entry: TensorEntry, storages: Mapping[str, range]) -> MappedTensor:
    """A listed tensor, checked.

    Raises:
        KeyError, TypeError, ValueError: if it is not within its storage, or that not within the
            file.
    """
    are_tuples = isinstance(entry.shape, tuple) and isinstance(entry.stride, tuple)
    if not are_tuples or not len(entry.shape) == len(entry.stride) <= MAX_DIMS:
        raise ValueError(f"no shape and stride of at most {MAX_DIMS} dimensions")
    if not isinstance(entry.storage, Storage) or not isinstance(entry.dtype, torch.dtype):
        raise ValueError("no storage, or no dtype")
    # Not shown: other content can have a text of any length.
    for number in (entry.offset, *entry.shape, *entry.stride):
        if type(number) is not int or not 0 <= number <= len(file):
            raise ValueError("an offset, a size or a stride that is no number of elements of it")

    storage = storages[entry.storage.key]
    start = storage.start + entry.offset * entry.dtype.itemsize
    tensor = MappedTensor(file, entry.dtype, entry.shape, entry.stride, start)
    stop = min(storage.stop, len(file))
    if start + tensor.num_bytes > stop:
        raise ValueError(f"bytes up to {start + tensor.num_bytes} of {stop}")
    return tensor
