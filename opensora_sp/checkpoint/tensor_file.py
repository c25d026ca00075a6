"""A safetensors file that is written tensor by tensor, in parts of a tensor.

Format (huggingface/safetensors): the length of the header in 8 bytes, the header in JSON (name,
dtype, shape and byte range of each tensor), the bytes of the tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.files import open_regular

from .filesystem import FileSystem

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor: all that the header of a file needs."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Names in the order of the file: large items first, which aligns them; then by name."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


class TensorFile:
    """A safetensors file being written: ``append`` every tensor in ``file_order``, then ``close``.

    Args:
        specs: dtype and shape of each tensor, by name.
        metadata: strings for the header.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        path: Path,
        specs: Mapping[str, Spec],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.filesystem, self.path, self.specs = filesystem, path, dict(specs)
        self._digest, self._bytes = hashlib.sha256(), 0

        self._file = path.open("wb", buffering=0)
        self._write(_header(self.specs, metadata))

    def append(self, name: str, chunks: Iterable[Tensor]) -> None:
        """Write a tensor in consecutive chunks of its elements; padding at the end is cut off."""
        remaining = self.specs[name].num_bytes
        for chunk in chunks:
            data = as_bytes(chunk)[:remaining]
            remaining -= data.numel()
            if data.numel():
                self._write(data.numpy().data)

        assert remaining == 0, f"{remaining} bytes of {name} are missing"

    def close(self) -> dict[str, Any]:
        """Flush the file; returns its size and SHA-256."""
        self._file.close()
        self.filesystem.flush(self.path)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        self.filesystem.write(self._file, data)
        self._digest.update(data)
        self._bytes += len(data)


def is_safetensors(path: Path) -> bool:
    """Whether the first bytes of a file are those of a safetensors file.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        start: bytes = file.read(9)
    return start[8:] == b"{"


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a CPU tensor, uint8 ``[num_bytes]``."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for name in file_order(specs):
        spec = specs[name]
        stop = start + spec.num_bytes
        entries[name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop

    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padded, so that the tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
