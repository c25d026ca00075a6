"""Safetensors files, written tensor by tensor in parts of a tensor, and indexes of their shards.

Format (huggingface/safetensors): the length of the header in 8 bytes, the header in JSON (name,
dtype, shape and byte range of each tensor), the bytes of the tensors without gaps.

``<name>.index.json`` in the Hugging Face layout: which of several files holds each tensor. Indexes
of a variant have its name before the suffix: ``model.safetensors.index.fp16.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.files import open_regular, read_json

from .filesystem import FileSystem, sha256

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

# Bytes of a header, of the library safetensors as well.
MAX_HEADER = 100_000_000
INDEX_NAME = re.compile(r".+\.index(\..+)?\.json")


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
            content = as_bytes(chunk)[:remaining]
            remaining -= content.numel()
            if content.numel():
                self._write(content.numpy().data)

        assert remaining == 0, f"{remaining} bytes of {name} are missing"

    def close(self) -> dict[str, Any]:
        """Flush the file; returns its size and SHA-256."""
        self._file.close()
        self.filesystem.flush(self.path)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()

    def _write(self, content: bytes | memoryview) -> None:
        self.filesystem.write(self._file, content)
        self._digest.update(content)
        self._bytes += len(content)


def is_safetensors(path: Path) -> bool:
    """True if a file begins as a safetensors file.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        start: bytes = file.read(9)
    # Eight characters of a text are a larger number.
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


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


def is_index(path: Path) -> bool:
    """True if a file is an index of shards, by its name."""
    return INDEX_NAME.fullmatch(path.name) is not None


@dataclass(frozen=True)
class ShardIndex:
    """An index of shards.

    Args:
        weight_map: tensor -> name of its file.
        metadata: "total_size" in bytes; in saves of this package also "sha256" of each file.
    """

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """Read an index. The shards need not be there.

        Raises:
            ValueError: if it cannot be read, is no index, or names files of other folders.
        """
        try:
            content = read_json(path)
            index = cls(path, dict(content["weight_map"]), dict(content.get("metadata") or {}))
            names = sorted(set(index.weight_map.values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"files {names}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _no_index(path, repr(error)) from None

        # Whoever made an index must not choose which other files are read.
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(
                f"got {path}, which names {outside[0]!r}; expected files of the same folder; do "
                "not use weights from this source"
            )
        return index

    @property
    def files(self) -> list[Path]:
        """The shards, sorted by name."""
        return [self.path.parent / name for name in sorted(set(self.weight_map.values()))]

    def check_complete(self) -> None:
        """Raise ValueError if there are no shards, or one is absent."""
        if not self.weight_map:
            raise _no_index(self.path, "it lists no files")

        absent = [file.name for file in self.files if not file.is_file()]
        if absent:
            raise ValueError(
                f"got {self.path}, of whose {len(self.files)} shards {len(absent)} are absent "
                f"({', '.join(absent[:4])}); expected all of them next to it; download or copy "
                "the rest"
            )

    def verify(self) -> None:
        """Raise ValueError if a shard is absent, or its SHA-256 is not the one of ``metadata``."""
        digests = self.metadata.get("sha256", {})
        for file in self.files:
            expected = digests.get(file.name)
            if not file.is_file() or (expected is not None and sha256(file) != expected):
                raise ValueError(
                    f"got a damaged checkpoint: {file} is not the file that {self.path.name} "
                    "lists; expected the files as they were saved; load another checkpoint"
                )


def _no_index(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"got {path}, which is not an index of shards ({reason}); expected JSON with a weight_map; "
        "download it again"
    )
