"""A dataset of precomputed latents and text features; ``cache_files`` describes its files.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from .cache_files import (
    INDEX,
    MANIFEST,
    DamagedRecordError,
    Key,
    Shard,
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


class CachedFeatures(Dataset["CachedClip | CorruptSample"]):
    """Clips of a feature cache, indexed by ``Sample``. Corrupt ones are ``CorruptSample``s.

    ``Sample.frames`` count latent frames here, each of which can be read by itself.

    Args:
        path: the folder.
        extra: further inputs of the model, which the cache was made with.

    Attributes:
        sizes: of the latents of each shape: f, h, w.
        latents: by shape and clip, the shard and the frame rate.
        texts: by clip, the shard and the number of tokens of its caption.

    Raises:
        ValueError: if the cache is not finished, or its index or a header is damaged.
        KeyError: for a clip or a shape that was not requested when the cache was made.
    """

    def __init__(self, path: str, extra: ExtraFiles | None = None) -> None:
        self.folder, self.extra = Path(path), extra
        self.index = read_index(self.folder)
        self.rows = Manifest(self.folder / MANIFEST)
        self.sizes: dict[ClipShape, tuple[int, int, int]] = {}
        self.latents: dict[ClipShape, dict[int, tuple[Path, float]]] = {}
        self.texts: dict[int, tuple[Path, int]] = {}
        self.corrupt: dict[Key, CorruptSample] = {}
        try:
            for name, (frames, height, width) in self.index["sizes"].items():
                self.sizes[parse_shape(name)] = int(frames), int(height), int(width)
            outdated = [(int(clip), parse_shape(shape)) for clip, shape in self.index["outdated"]]
            checksums = dict(self.index["shards"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged_index(self.folder, repr(error)) from None

        for name, checksum in checksums.items():
            shard = Shard.read(self.folder / name)
            if shard.checksum != checksum:
                raise damaged_record(shard.path, "clips", "the index has another checksum of it")
            self._add(shard)
        self._remove(outdated)

        # They would be found in the middle of a training.
        for shape, clips in self.latents.items():
            if shape not in self.sizes or not clips.keys() <= self.texts.keys():
                raise damaged_index(self.folder, "clips without size of latents, or caption")

    def _add(self, shard: Shard) -> None:
        """Take over what a shard holds, in place of what former shards hold of the same clips."""
        for clip, tokens in shard.texts.items():
            self.texts[clip] = shard.path, tokens
        for (clip, shape), rate in shard.fps.items():
            self.latents.setdefault(shape, {})[clip] = shard.path, rate
        for key, why in shard.corrupt.items():
            self.corrupt[key] = CorruptSample(*why)

    def _remove(self, outdated: list[Key]) -> None:
        for clip, shape in outdated:
            self.latents.get(shape, {}).pop(clip, None)
        # Encoded by one run, and not readable in another one.
        for clip, shape in list(self.corrupt):
            if clip in self.latents.get(shape, {}):
                del self.corrupt[clip, shape]

    @property
    def fingerprint(self) -> dict[str, str]:
        """``Manifest.fingerprint`` of the manifest that the cache was made of."""
        columns: dict[str, str] = self.index["manifest_columns"]
        return columns

    @property
    def index_digest(self) -> str:
        """A digest of the index, and with it of the headers of all shards."""
        return hashlib.sha256((self.folder / INDEX).read_bytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, shape: ClipShape) -> np.ndarray:
        """The clips that have latents of a shape, or are known to be corrupt."""
        clips = sorted(self.latents.get(shape, {}))
        clips += [clip for clip, at in self.corrupt if at == shape]
        return np.array(clips, dtype=np.int64)

    def text_length(self, clip: int) -> int:
        """Tokens of a clip's caption; 0 for a clip that could not be read in any shape."""
        _, tokens = self.texts.get(clip, (None, 0))
        return tokens

    def __getitem__(self, sample: Sample) -> CachedClip | CorruptSample:
        corrupt = self.corrupt.get((sample.clip, sample.shape))
        if corrupt is not None:
            return corrupt

        shard, fps = self.latents[sample.shape][sample.clip]
        size = self.sizes[sample.shape]
        first, stop = sample.frames or (0, size[0])
        name = latents_name((sample.clip, sample.shape))
        latents = read_record(shard, name, slice(first, stop))
        if latents.shape[1:] != (len(range(size[0])[first:stop]), *size[1:]):
            raise _of_another_shape(shard, name, latents)

        text, extra = None, dict[str, Tensor]()
        if first == 0:
            text_shard, _ = self.texts[sample.clip]
            text = read_record(text_shard, text_name(sample.clip))
            extra = self._read_extra(shard, (sample.clip, sample.shape))
        return CachedClip(latents, text, fps, extra)

    def _read_extra(self, shard: Path, key: Key) -> dict[str, Tensor]:
        """The further inputs of a clip, float32, by name."""
        inputs = {}
        shapes = {} if self.extra is None else self.extra.shapes_of(key[1])
        for name, shape in shapes.items():
            record = extra_name(key, name)
            inputs[name] = read_record(shard, record).float()
            if inputs[name].shape != shape:
                raise _of_another_shape(shard, record, inputs[name])
        return inputs


def _of_another_shape(shard: Path, name: str, record: Tensor) -> DamagedRecordError:
    return damaged_record(shard, name, f"its shape is {tuple(record.shape)}")
