"""A dataset of precomputed latents and text features, and its files.

    cache/
      index.json                the fingerprint, the shard of each clip, and the corrupt clips
      clips.jsonl               the manifest that the features were made of
      shard-000000.safetensors  "latents/<clip>/<frames>x<height>x<width>" [c, f, h, w],
      "text/<clip>" [tokens, W]

Clips are numbered by their line in the manifest. The header of a shard holds as JSON the frame
rates of its clips (``fps``) and the clips that could not be read (``broken``), so the index can
always be rebuilt from the shards. Numbers are kept in 16 bits where that loses nothing.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from opensora_sp.json_reader import parse_json, read_json

from .dataset import ClipShape, CorruptSample, Sample
from .manifest import Manifest

FORMAT = 1
INDEX, MANIFEST = "index.json", "clips.jsonl"
# Of about 20 M clips.
INDEX_BYTES = 1 << 30
Key = tuple[int, ClipShape]
"""A clip, and the shape that it was cut to."""


@dataclass(frozen=True)
class CachedClip:
    """Latents ``[c, f, h, w]`` of one clip, or some of its latent frames.

    With the first latent frame comes the caption's features ``[tokens, W]``.
    """

    latents: Tensor
    text: Tensor | None
    fps: float


@dataclass(frozen=True)
class Shard:
    """The header of one shard file."""

    path: Path
    fps: dict[Key, float]
    texts: dict[int, int]  # tokens of each clip's caption
    corrupt: dict[Key, tuple[str, str]]  # path and reason

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read it without the tensors.

        Raises:
            ValueError: if the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        texts, fps, corrupt = {}, {}, {}
        try:
            with safe_open(path, "pt") as file:
                header = parse_json(file.metadata()["clips"], f"the header of {path}")
                for name in file.keys():
                    if name.startswith("text/"):
                        texts[int(name.split("/")[1])] = file.get_slice(name).get_shape()[0]
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise ValueError(
                f"got {str(path)!r}, which cannot be read ({error}); expected a shard of a feature "
                "cache; remove it and run scripts/precompute.py again"
            ) from None

        for clip, shape, rate in header["fps"]:
            fps[clip, parse_shape(shape)] = rate
        for clip, shape, file, reason in header["broken"]:
            corrupt[clip, parse_shape(shape)] = file, reason
        return cls(path, fps, texts, corrupt)


@dataclass
class ShardContent:
    """What one shard file holds: latents by clip and shape, captions' features by clip."""

    latents: dict[Key, Tensor] = field(default_factory=dict)
    fps: dict[Key, float] = field(default_factory=dict)
    texts: dict[int, Tensor] = field(default_factory=dict)
    corrupt: dict[Key, tuple[str, str]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file."""
        from safetensors.torch import save

        tensors = {}
        for (clip, shape), z in self.latents.items():
            tensors[f"latents/{clip}/{shape_name(shape)}"] = in_fewest_bits(z)
        for clip, features in self.texts.items():
            tensors[f"text/{clip}"] = in_fewest_bits(features)

        header: dict[str, list[Any]] = {"fps": [], "broken": []}
        for (clip, shape), rate in self.fps.items():
            header["fps"].append([clip, shape_name(shape), rate])
        for (clip, shape), why in self.corrupt.items():
            header["broken"].append([clip, shape_name(shape), *why])
        return save(tensors, {"clips": json.dumps(header)})


def in_fewest_bits(x: Tensor) -> Tensor:
    """The same numbers on the CPU, in 16 bits where that loses nothing, as with bf16 encoders."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return x.to("cpu", dtype).contiguous()
    return x.cpu().contiguous()


def index_of(
    made_of: dict[str, Any],
    source: dict[str, int],
    sizes: dict[ClipShape, tuple[int, int, int]],
    shards: list[Shard],
) -> dict[str, Any]:
    """The content of ``index.json``.

    Args:
        made_of: the fingerprint, by part.
        source: channels, width and max_length of the encoders.
        sizes: of the latents of each shape.
        shards: all there are; of a clip that several hold the last one counts.
    """
    shard_of: dict[Key, int] = {}
    fps: dict[Key, float] = {}
    texts: dict[int, tuple[int, int]] = {}
    corrupt: dict[Key, tuple[str, str]] = {}
    for number, shard in enumerate(shards):
        shard_of |= dict.fromkeys(shard.fps, number)
        fps |= shard.fps
        texts |= {clip: (number, tokens) for clip, tokens in shard.texts.items()}
        corrupt |= shard.corrupt

    latents = {}
    for shape, size in sizes.items():
        keys = sorted(key for key in fps if key[1] == shape)
        latents[shape_name(shape)] = {
            "size": size,
            "clips": [clip for clip, _ in keys],
            "shards": [shard_of[key] for key in keys],
            "fps": [fps[key] for key in keys],
        }

    unreadable = []
    for (clip, shape), why in sorted(corrupt.items()):
        if (clip, shape) not in fps:
            unreadable.append([clip, shape_name(shape), *why])
    clips = sorted(texts)
    return {
        "format": FORMAT,
        "made_of": made_of,
        "source": source,
        "shards": [shard.path.name for shard in shards],
        "latents": latents,
        "texts": {
            "clips": clips,
            "shards": [texts[clip][0] for clip in clips],
            "tokens": [texts[clip][1] for clip in clips],
        },
        "broken": unreadable,
    }


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a cache.

    Raises:
        ValueError: if there is none, or it is of another format.
    """
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"got dataset.path {str(folder)!r} without {INDEX}; expected a finished feature cache; "
            f"run scripts/precompute.py CONFIG -o {folder}, which resumes where it was interrupted"
        )
    index: dict[str, Any] = read_json(folder / INDEX, max_bytes=INDEX_BYTES)
    if index.get("format") != FORMAT:
        raise ValueError(
            f"got a feature cache of format {index.get('format')!r} in {str(folder)!r}; expected "
            f"format {FORMAT}; make it again with scripts/precompute.py"
        )
    return index


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

    Raises:
        ValueError: if the cache is not finished.
        KeyError: for a clip or a shape that was not requested when the cache was made.
    """

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self.index = read_index(self.folder)
        self.rows = Manifest(self.folder / MANIFEST)

        self.sizes: dict[ClipShape, tuple[int, int, int]] = {}
        self._latents: dict[ClipShape, LatentColumns] = {}
        for name, entry in self.index["latents"].items():
            shape = parse_shape(name)
            self.sizes[shape] = tuple(entry["size"])
            columns = (np.array(entry[column]) for column in LatentColumns._fields)
            self._latents[shape] = LatentColumns(*columns)

        texts = self.index["texts"]
        self._text_shards = dict(zip(texts["clips"], texts["shards"], strict=True))
        self._text_lengths: dict[int, int] = {}
        if "tokens" in texts:
            self._text_lengths = dict(zip(texts["clips"], texts["tokens"], strict=True))
        else:
            # An index of a former version, which did not hold them.
            for name in self.index["shards"]:
                self._text_lengths |= Shard.read(self.folder / name).texts

        self.corrupt: dict[Key, CorruptSample] = {}
        for clip, shape_text, file, reason in self.index["broken"]:
            self.corrupt[clip, parse_shape(shape_text)] = CorruptSample(file, reason)

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, shape: ClipShape) -> np.ndarray:
        """The clips that have latents of a shape, or are known to be corrupt."""
        clips = self._latents[shape].clips.tolist() if shape in self._latents else []
        clips += [clip for clip, at in self.corrupt if at == shape]
        return np.array(clips, dtype=np.int64)

    def text_length(self, clip: int) -> int:
        """Tokens of a clip's caption; 0 for a clip that could not be read in any shape."""
        return self._text_lengths.get(clip, 0)

    def __getitem__(self, sample: Sample) -> CachedClip | CorruptSample:
        corrupt = self.corrupt.get((sample.clip, sample.shape))
        if corrupt is not None:
            return corrupt

        columns = self._latents[sample.shape]
        row = _find(columns.clips, sample.clip)
        first, stop = sample.frames or (0, self.sizes[sample.shape][0])
        name = f"latents/{sample.clip}/{shape_name(sample.shape)}"
        latents = self._read(columns.shards[row], name, slice(first, stop))

        text = None
        if first == 0:
            text = self._read(self._text_shards[sample.clip], f"text/{sample.clip}")
        return CachedClip(latents, text, float(columns.fps[row]))

    def _read(self, shard: int, name: str, frames: slice | None = None) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.folder / self.index["shards"][shard], "pt") as file:
            tensor: Tensor
            tensor = file.get_tensor(name) if frames is None else file.get_slice(name)[:, frames]
            return tensor


def _find(clips: np.ndarray, clip: int) -> int:
    row = int(np.searchsorted(clips, clip))
    if row == len(clips) or clips[row] != clip:
        raise KeyError(clip)
    return row


def shape_name(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape)


def parse_shape(name: str) -> ClipShape:
    return ClipShape(*(int(side) for side in name.split("x")))
