"""A dataset of precomputed latents and text features; ``cache_files`` describes its files.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from .cache_files import (
    INDEX,
    MANIFEST,
    DamagedRecordError,
    Key,
    damaged_index,
    damaged_record,
    extra_name,
    latents_name,
    parse_shape,
    read_index,
    read_record,
    text_name,
)
from .dataset import ClipShape, CorruptSample, ExtraFiles, Sample
from .manifest import Manifest


@dataclass(frozen=True)
class CachedClip:
    """Latents ``[c, f, h, w]`` of one clip, or some of its latent frames.

    With the first latent frame come the caption's features ``[tokens, W]``, and further inputs of
    the model by name.
    """

    latents: Tensor
    text: Tensor | None
    fps: float
    extra: Mapping[str, Tensor] = field(default_factory=dict)


class LatentColumns(NamedTuple):
    """The clips of one shape, in ascending order, with the shard and the frame rate of each."""

    clips: np.ndarray
    shards: np.ndarray
    fps: np.ndarray


class CachedFeatures(Dataset["CachedClip | CorruptSample"]):
    """Clips of a feature cache, indexed by ``Sample``. Corrupt ones are ``CorruptSample``s.

    ``Sample.frames`` count latent frames here, each of which can be read by itself.

    Args:
        path: the folder.
        extra: further inputs of the model, which the cache was made with.

    Raises:
        ValueError: if the cache is not finished.
        KeyError: for a clip or a shape that was not requested when the cache was made.
    """

    def __init__(self, path: str, extra: ExtraFiles | None = None) -> None:
        self.folder, self.extra = Path(path), extra
        self.index = read_index(self.folder)
        self.rows = Manifest(self.folder / MANIFEST)
        try:
            self._read_columns()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged_index(self.folder, repr(error)) from None

    def _read_columns(self) -> None:
        self.sizes: dict[ClipShape, tuple[int, int, int]] = {}
        self._latents: dict[ClipShape, LatentColumns] = {}
        for name, entry in self.index["latents"].items():
            shape = parse_shape(name)
            frames, height, width = map(int, entry["size"])
            self.sizes[shape] = frames, height, width
            columns = LatentColumns(
                np.array(entry["clips"], np.int64),
                self._shard_numbers(entry),
                np.array(entry["fps"], np.float64),
            )
            if len(columns.fps) != len(columns.clips):
                raise ValueError(f"{len(columns.fps)} frame rates of {len(columns.clips)} clips")
            self._latents[shape] = columns

        # A clip without its caption would be found in the middle of a training.
        texts = self.index["texts"]
        self._shard_numbers(texts)
        for columns in self._latents.values():
            if not np.isin(columns.clips, np.array(texts["clips"], np.int64)).all():
                raise ValueError("clips without features of their captions")
        self._text_shards = dict(zip(texts["clips"], texts["shards"], strict=True))
        self._text_lengths = dict(zip(texts["clips"], texts["tokens"], strict=True))

        self.corrupt: dict[Key, CorruptSample] = {}
        for clip, shape_text, file, reason in self.index["broken"]:
            self.corrupt[clip, parse_shape(shape_text)] = CorruptSample(file, reason)

    def _shard_numbers(self, entry: dict[str, list[int]]) -> np.ndarray:
        """The shard of each clip in a part of the index; there must be such shards."""
        numbers = np.array(entry["shards"], np.int64)
        count = len(self.index["shards"])
        if len(numbers) != len(entry["clips"]) or not np.isin(numbers, range(count)).all():
            raise ValueError(f"other numbers of shards than 0 to {count - 1} for each clip")
        return numbers

    @property
    def fingerprint(self) -> dict[str, str]:
        """``Manifest.fingerprint`` of the manifest that the cache was made of."""
        columns: dict[str, str] = self.index["manifest_columns"]
        return columns

    @property
    def index_digest(self) -> str:
        """A digest of the index, and with it of all content of the cache."""
        return hashlib.sha256((self.folder / INDEX).read_bytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, shape: ClipShape) -> np.ndarray:
        """The clips that have latents of a shape, or are known to be corrupt."""
        clips = self._latents[shape].clips.tolist() if shape in self._latents else []
        clips += [clip for clip, at in self.corrupt if at == shape]
        return np.array(clips, dtype=np.int64)

    def text_length(self, clip: int) -> int:
        """Tokens of a clip's caption; 0 for a clip that could not be read in any shape."""
        return int(self._text_lengths.get(clip, 0))

    def __getitem__(self, sample: Sample) -> CachedClip | CorruptSample:
        corrupt = self.corrupt.get((sample.clip, sample.shape))
        if corrupt is not None:
            return corrupt

        columns = self._latents[sample.shape]
        row = _find(columns.clips, sample.clip)
        size = self.sizes[sample.shape]
        first, stop = sample.frames or (0, size[0])
        name = latents_name((sample.clip, sample.shape))
        latents = self._read(columns.shards[row], name, slice(first, stop))
        if latents.shape[1:] != (len(range(size[0])[first:stop]), *size[1:]):
            raise self._of_another_shape(columns.shards[row], name, latents)

        text, extra = None, dict[str, Tensor]()
        if first == 0:
            text = self._read(self._text_shards[sample.clip], text_name(sample.clip))
            extra = self._read_extra(columns.shards[row], (sample.clip, sample.shape))
        return CachedClip(latents, text, float(columns.fps[row]), extra)

    def _read_extra(self, number: int, key: Key) -> dict[str, Tensor]:
        """The further inputs of a clip, float32, by name."""
        inputs = {}
        shapes = {} if self.extra is None else self.extra.shapes_of(key[1])
        for name, shape in shapes.items():
            record = extra_name(key, name)
            inputs[name] = self._read(number, record).float()
            if inputs[name].shape != shape:
                raise self._of_another_shape(number, record, inputs[name])
        return inputs

    def _of_another_shape(self, number: int, name: str, record: Tensor) -> DamagedRecordError:
        path = self.folder / self.index["shards"][number]
        return damaged_record(path, name, f"its shape is {tuple(record.shape)}")

    def _read(self, number: int, name: str, frames: slice | None = None) -> Tensor:
        return read_record(self.folder / self.index["shards"][number], name, frames)


def _find(clips: np.ndarray, clip: int) -> int:
    row = int(np.searchsorted(clips, clip))
    if row == len(clips) or clips[row] != clip:
        raise KeyError(clip)
    return row
