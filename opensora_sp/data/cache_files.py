"""The files of a feature cache.

    cache/
      index.json                the fingerprint, sizes of latents, names and checksums of the shards
      clips.jsonl               the manifest that the features were made of
      shard-000000.safetensors  "latents/<clip>/<frames>x<height>x<width>" [c, f, h, w],
      "text/<clip>" [tokens, W], "extra/<clip>/<frames>x<height>x<width>/<name>" for further inputs
      of a derived model, and for each record "crc32/<record>": a checksum of each latent frame, or
      of the whole record

Clips are numbered by their line in the manifest. The header of a shard holds as JSON what its
features were made of, the frame rates of its clips (``fps``), the states of their files (``files``)
and the clips that could not be read (``broken``). Of a clip that several shards hold, the last one
counts. Numbers are kept in 16 bits where that loses nothing. The JSON of header and index holds a
checksum of itself.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora_sp.common.files import parse_json, read_json

from .dataset import ClipShape

FORMAT = 2
INDEX, MANIFEST = "index.json", "clips.jsonl"
CHUNK_BYTES = 1 << 20
CHECKSUM, MANIFEST_CHECKSUM = "crc32", "manifest_crc32"
Key = tuple[int, ClipShape]
"""A clip, and the shape that it was cut to."""


class DamagedRecordError(ValueError):
    """A record of a feature cache is not what was written. Unlike a corrupt clip, it ends a run."""


class FileState(NamedTuple):
    """Bytes, time of the last change in ns, and CRC-32 of a file."""

    size: int
    changed_at: int
    checksum: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of a file now."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, file_checksum(path))

    def is_of(self, path: Path) -> bool:
        """True if a file has this content, or cannot be read now.

        A file is read only where its time differs, as the time of a copy does.
        """
        try:
            status = path.stat()
            if status.st_size != self.size:
                return False
            return status.st_mtime_ns == self.changed_at or file_checksum(path) == self.checksum
        except OSError:
            return True


@dataclass(frozen=True)
class Shard:
    """The header of one shard file."""

    path: Path
    checksum: int
    made_of: dict[str, Any]  # the fingerprint
    fps: dict[Key, float]
    files: dict[Key, list[FileState]]  # states of the files that were read
    texts: dict[int, int]  # tokens of each clip's caption
    corrupt: dict[Key, tuple[str, str]]  # path and reason

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read it without the tensors.

        Raises:
            ValueError: if the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        texts, fps, files, corrupt = {}, {}, {}, {}
        try:
            with safe_open(path, "pt") as file:
                header = parse_json(file.metadata()["clips"], f"the header of {path}")
                # From shapes alone: no tensor is read.
                for name in file.keys():
                    if name.startswith("text/"):
                        texts[int(name.split("/")[1])] = file.get_slice(name).get_shape()[0]

            check_seal(header)
            for clip, shape, rate in header["fps"]:
                fps[clip, parse_shape(shape)] = rate
            for clip, shape, states in header["files"]:
                files[clip, parse_shape(shape)] = [FileState(*state) for state in states]
            for clip, shape, source, reason in header["broken"]:
                corrupt[clip, parse_shape(shape)] = source, reason
            return cls(path, header[CHECKSUM], header["made_of"], fps, files, texts, corrupt)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"got {str(path)!r}, which cannot be read ({error}); expected a shard of a feature "
                "cache; remove it and run opensora-sp precompute again"
            ) from None


@dataclass
class ShardContent:
    """Content of one shard file: latents by clip and shape, captions' features by clip.

    ``extra`` are further inputs of a model, by name; ``files`` the states of the files read.
    """

    made_of: dict[str, Any]
    latents: dict[Key, Tensor] = field(default_factory=dict)
    fps: dict[Key, float] = field(default_factory=dict)
    files: dict[Key, list[FileState]] = field(default_factory=dict)
    texts: dict[int, Tensor] = field(default_factory=dict)
    extra: dict[Key, Mapping[str, Tensor]] = field(default_factory=dict)
    corrupt: dict[Key, tuple[str, str]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file."""
        from safetensors.torch import save

        records = {}
        for key, z in self.latents.items():
            records[latents_name(key)] = in_fewest_bits(z)
        for clip, features in self.texts.items():
            records[text_name(clip)] = in_fewest_bits(features)
        for key, inputs in self.extra.items():
            for name, x in inputs.items():
                records[extra_name(key, name)] = in_fewest_bits(x)

        sums = {}
        for name, record in records.items():
            sums[f"{CHECKSUM}/{name}"] = torch.tensor(checksums(name, record))

        header: dict[str, Any] = {"made_of": self.made_of, "fps": [], "files": [], "broken": []}
        for (clip, shape), rate in self.fps.items():
            header["fps"].append([clip, shape_name(shape), rate])
        for (clip, shape), states in self.files.items():
            header["files"].append([clip, shape_name(shape), states])
        for (clip, shape), why in self.corrupt.items():
            header["broken"].append([clip, shape_name(shape), *why])
        return save(records | sums, {"clips": json.dumps(sealed(header))})


def latents_name(key: Key) -> str:
    """The record of a clip's latents."""
    return f"latents/{key[0]}/{shape_name(key[1])}"


def text_name(clip: int) -> str:
    """The record of the features of a clip's caption."""
    return f"text/{clip}"


def extra_name(key: Key, name: str) -> str:
    """The record of a further input of a clip."""
    return f"extra/{key[0]}/{shape_name(key[1])}/{name}"


def in_fewest_bits(x: Tensor) -> Tensor:
    """The same numbers on the CPU, in 16 bits where that loses nothing, as with bf16 encoders."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return x.to("cpu", dtype).contiguous()
    return x.cpu().contiguous()


def checksums(name: str, record: Tensor, first: int = 0) -> list[int]:
    """CRC-32 of each frame of latents, or of another record as a whole.

    They cover name, dtype and shape too, so that no record is taken for another.

    Args:
        first: the number of the record's first frame, where it is a part of the latents.
    """
    parts = record.unbind(1) if name.startswith("latents/") else [record]
    sums = []
    for number, part in enumerate(parts, first):
        # Of the name as well, so that exchanged records are noticed.
        start = zlib.crc32(f"{name} {number} {part.dtype} {tuple(part.shape)}".encode())
        sums.append(zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, start))
    return sums


def read_record(path: Path, name: str, frames: slice | None = None) -> Tensor:
    """A record of a shard, or some frames of latents.

    Raises:
        DamagedRecordError: if the shard cannot be read, or has another record than was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            record: Tensor
            record = file.get_tensor(name) if frames is None else file.get_slice(name)[:, frames]
            written = file.get_tensor(f"{CHECKSUM}/{name}").tolist()
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise damaged_record(path, name, str(error)) from None

    first, stop = (0, None) if frames is None else (frames.start, frames.stop)
    if checksums(name, record, first) != written[first:stop]:
        raise damaged_record(path, name, "its checksum differs")
    return record


def damaged_record(path: Path, name: str, reason: str) -> DamagedRecordError:
    """The error of a record that is not the one that was written."""
    return DamagedRecordError(
        f"got the record {name!r} of {str(path)!r}, which is damaged ({reason}); expected what was "
        "written; remove this file and run opensora-sp precompute again, which encodes its clips "
        "anew"
    )


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """JSON content with a checksum of itself."""
    text = json.dumps(content, sort_keys=True)
    return {**content, CHECKSUM: zlib.crc32(text.encode())}


def check_seal(content: dict[str, Any]) -> None:
    """Raise ValueError unless the content is the one that its checksum was made of."""
    unsealed = {key: content[key] for key in content if key != CHECKSUM}
    if sealed(unsealed) != content:
        raise ValueError("its checksum differs")


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a cache.

    Raises:
        ValueError: if there is none, or it is of another format, damaged, or names files that its
            folder does not have.
    """
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"got dataset.path {str(folder)!r} without {INDEX}; expected a finished feature cache; "
            f"run opensora-sp precompute CONFIG -o {folder}, which resumes where it was interrupted"
        )
    check_files(folder, [INDEX])
    try:
        index: dict[str, Any] = read_json(folder / INDEX)
        check_seal(index)
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged_index(folder, str(error)) from None
    if index.get("format") != FORMAT:
        raise ValueError(
            f"got a feature cache of format {index.get('format')!r} in {str(folder)!r}; expected "
            f"format {FORMAT}; make it again with opensora-sp precompute"
        )
    try:
        check_files(folder, [MANIFEST, *index["shards"]])
    except (KeyError, TypeError) as error:
        raise damaged_index(folder, f"shards: {error!r}") from None

    if index.get(MANIFEST_CHECKSUM) != file_checksum(folder / MANIFEST):
        raise damaged_index(folder, f"of another {MANIFEST}")
    return index


def damaged_index(folder: Path, reason: str) -> ValueError:
    """The error of an index that is not what was written."""
    return ValueError(
        f"got the feature cache {str(folder)!r} with a damaged {INDEX} ({reason}); expected what "
        f"was written; remove {INDEX} and run opensora-sp precompute again, which makes it from "
        "the shards"
    )


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Raise ValueError unless all names belong to regular files of the folder itself."""
    present = {entry.name: entry for entry in os.scandir(folder)}
    absent = []
    for name in names:
        entry = present.get(name)
        leaves = os.path.basename(name) != name or name == os.pardir
        if entry is not None and entry.is_symlink():
            leaves = not Path(entry.path).resolve().is_relative_to(folder.resolve())
        if leaves:
            raise ValueError(
                f"got the file {name!r} in the feature cache {str(folder)!r}, which leads out of "
                "this folder; expected files of the folder itself; do not use a cache from this "
                "source"
            )
        if entry is None or not entry.is_file():
            absent.append(name)

    if absent:
        raise ValueError(
            f"got the feature cache {str(folder)!r} without {len(absent)} of its files (the first "
            f"is {absent[0]!r}); expected all of them; copy the rest, or run opensora-sp "
            "precompute again, which encodes their clips anew"
        )


def file_checksum(path: Path) -> int:
    """CRC-32 of a file's bytes, of which a part is in memory."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total


def shape_name(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape)


def parse_shape(name: str) -> ClipShape:
    return ClipShape(*(int(side) for side in name.split("x")))
