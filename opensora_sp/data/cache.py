"""Latents of clips and features of captions, made ahead (``features/precompute.py``), as a dataset.

    cache/
      index.json                what they were made of, where those of each clip lie, and which clips are broken
      clips.jsonl               the manifest they were made of
      shard-000000.safetensors  "latents/<clip>/<frames>x<height>x<width>" [c, f, h, w], "text/<clip>" [tokens, W]

Clips are numbered by their line in the manifest. A shard also says in its header, as JSON, how many frames per second
its clips have (``fps``) and which could not be read (``broken``), so the index can always be made again of the shards.
Numbers are kept in half the bytes where that loses nothing.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .dataset import BrokenClip, ClipShape, Sample
from .manifest import Manifest

FORMAT = 1
INDEX, MANIFEST = "index.json", "clips.jsonl"
Key = tuple[int, ClipShape]
"""A clip, and the shape that it was cut to."""


@dataclass(frozen=True)
class CachedClip:
    """Latents ``[c, f, h, w]`` of one clip, or latent frames of it, and, with the first of them, its caption's features
    ``[tokens, W]``."""

    latents: Tensor
    text: Tensor | None
    fps: float


@dataclass(frozen=True)
class Shard:
    """What one file holds."""

    path: Path
    fps: dict[Key, float]
    texts: dict[int, int]  # tokens of each clip's caption
    broken: dict[Key, tuple[str, str]]  # path and reason

    @classmethod
    def read(cls, path: Path) -> Shard:
        """From the file's header.

        Raises:
            ValueError: if it is damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                told = json.loads(file.metadata()["clips"])
                names = [name for name in file.keys() if name.startswith("text/")]
                texts = {
                    int(name.split("/")[1]): file.get_slice(name).get_shape()[0] for name in names
                }
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise ValueError(
                f"got {str(path)!r}, which cannot be read ({error}); expected a shard of a feature cache; remove it "
                "and run scripts/precompute.py again"
            ) from None
        fps = {(clip, parse_shape(shape)): rate for clip, shape, rate in told["fps"]}
        broken = {
            (clip, parse_shape(shape)): (file, why) for clip, shape, file, why in told["broken"]
        }
        return cls(path, fps, texts, broken)


def shard_bytes(
    latents: dict[Key, Tensor],
    fps: dict[Key, float],
    texts: dict[int, Tensor],
    broken: dict[Key, tuple[str, str]],
) -> bytes:
    """A shard's file."""
    from safetensors.torch import save

    tensors = {
        f"latents/{clip}/{shape_name(shape)}": narrowed(z) for (clip, shape), z in latents.items()
    }
    tensors |= {f"text/{clip}": narrowed(features) for clip, features in texts.items()}
    told = {
        "fps": [[clip, shape_name(shape), rate] for (clip, shape), rate in fps.items()],
        "broken": [[clip, shape_name(shape), *why] for (clip, shape), why in broken.items()],
    }
    return save(tensors, {"clips": json.dumps(told)})


def narrowed(x: Tensor) -> Tensor:
    """The same numbers, on the CPU, in 16 bits where that loses nothing: encoders often compute in these."""
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
    """What ``index.json`` holds.

    Args:
        made_of: the fingerprint, by part.
        source: channels, width and max_length of the encoders.
        sizes: of the latents of each shape.
        shards: all there are; of a clip that several hold the last one counts.
    """
    at = {
        key: (number, rate)
        for number, shard in enumerate(shards)
        for key, rate in shard.fps.items()
    }
    texts = {
        clip: (number, tokens)
        for number, shard in enumerate(shards)
        for clip, tokens in shard.texts.items()
    }
    broken = {key: why for shard in shards for key, why in shard.broken.items() if key not in at}
    latents = {}
    for shape, size in sizes.items():
        clips = sorted(clip for clip, of_shape in at if of_shape == shape)
        where = [at[clip, shape] for clip in clips]
        latents[shape_name(shape)] = {
            "size": size,
            "clips": clips,
            "shards": [number for number, _ in where],
            "fps": [rate for _, rate in where],
        }
    return {
        "format": FORMAT,
        "made_of": made_of,
        "source": source,
        "shards": [shard.path.name for shard in shards],
        "latents": latents,
        "texts": {
            "clips": sorted(texts),
            "shards": [texts[clip][0] for clip in sorted(texts)],
            "tokens": [texts[clip][1] for clip in sorted(texts)],
        },
        "broken": [
            [clip, shape_name(shape), *why] for (clip, shape), why in sorted(broken.items())
        ],
    }


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a cache.

    Raises:
        ValueError: if there is none, or it is of another format.
    """
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"got dataset.path {str(folder)!r} without {INDEX}; expected a finished feature cache; run "
            f"scripts/precompute.py CONFIG -o {folder}, which goes on where it was interrupted"
        )
    index = json.loads((folder / INDEX).read_text())
    if index.get("format") != FORMAT:
        raise ValueError(
            f"got a feature cache of format {index.get('format')!r} in {str(folder)!r}; expected format {FORMAT}; "
            "make it again with scripts/precompute.py"
        )
    return index


class CachedFeatures(Dataset):
    """Clips of a feature cache, by ``Sample``, as ``CachedClip``; those that could not be read come as ``BrokenClip``.

    ``Sample.frames`` count latent frames here, each of which can be read by itself.

    Args:
        path: the folder.

    Raises:
        ValueError: if the cache is not finished.
        KeyError: for a clip or a shape that was not asked for when the cache was made.
    """

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self.index = read_index(self.folder)
        self.rows = Manifest(self.folder / MANIFEST)
        self.sizes: dict[ClipShape, tuple[int, int, int]] = {
            parse_shape(name): tuple(held["size"]) for name, held in self.index["latents"].items()
        }
        self._held = {  # by shape: clips in order, their shards, their rates
            parse_shape(name): tuple(
                np.array(held[column]) for column in ("clips", "shards", "fps")
            )
            for name, held in self.index["latents"].items()
        }
        texts = self.index["texts"]
        self._texts = tuple(
            np.array(texts[column], dtype=np.int64) for column in ("clips", "shards")
        )
        self._text_lengths: dict[int, int]
        if "tokens" in texts:
            self._text_lengths = dict(zip(texts["clips"], texts["tokens"], strict=True))
        else:  # an index that was written before it held them
            shards = [Shard.read(self.folder / name) for name in self.index["shards"]]
            self._text_lengths = {
                clip: tokens for shard in shards for clip, tokens in shard.texts.items()
            }
        self.broken: dict[ClipShape, dict[int, BrokenClip]] = {}
        for clip, shape, file, why in self.index["broken"]:
            self.broken.setdefault(parse_shape(shape), {})[clip] = BrokenClip(file, why)

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, shape: ClipShape) -> np.ndarray:
        """The clips of which there are latents of a shape, or which are known to be broken."""
        held = self._held[shape][0].tolist() if shape in self._held else []
        return np.array([*held, *self.broken.get(shape, {})], dtype=np.int64)

    def text_length(self, clip: int) -> int:
        """Tokens of a clip's caption; 0 of one that could not be read in any shape."""
        return self._text_lengths.get(clip, 0)

    def __getitem__(self, sample: Sample) -> CachedClip | BrokenClip:
        broken = self.broken.get(sample.shape, {}).get(sample.clip)
        if broken is not None:
            return broken
        clips, shards, rates = self._held[sample.shape]
        place = _find(clips, sample.clip)
        first, stop = sample.frames or (0, self.sizes[sample.shape][0])
        name = f"latents/{sample.clip}/{shape_name(sample.shape)}"
        latents = self._read(shards[place], name, slice(first, stop))
        text = None
        if first == 0:
            text = self._read(
                self._texts[1][_find(self._texts[0], sample.clip)], f"text/{sample.clip}"
            )
        return CachedClip(latents, text, float(rates[place]))

    def _read(self, shard: int, name: str, frames: slice | None = None) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.folder / self.index["shards"][shard], "pt") as file:
            return file.get_tensor(name) if frames is None else file.get_slice(name)[:, frames]


def _find(clips: np.ndarray, clip: int) -> int:
    place = int(np.searchsorted(clips, clip))
    if place == len(clips) or clips[place] != clip:
        raise KeyError(clip)
    return place


def shape_name(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape)


def parse_shape(name: str) -> ClipShape:
    return ClipShape(*(int(side) for side in name.split("x")))
