"""A feature cache: precomputed latents and text features, as a dataset.

    cache/
      index.json                the fingerprint, sizes of latents, names of the shards
      clips.jsonl               the manifest that the features were made of
      shard-000000.safetensors  "latents/<clip>/<frames>x<height>x<width>" [c, f, h, w],
      "text/<clip>" [tokens, W], "extra/<clip>/<frames>x<height>x<width>/<name>" for further inputs
      of a derived model

Clips are numbered by their line in the manifest. The header of a shard lists as JSON its clips and
those that could not be read. Numbers are kept in 16 bits where that loses nothing.

Legend: c latent channels, f x h x w latent size, W width of text features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from torch.utils.data import Dataset

from opensora_sp.common.files import parse_json, read_json

from .dataset import ClipShape, CorruptSample, ExtraFiles, Sample
from .manifest import Manifest

INDEX, MANIFEST = "index.json", "clips.jsonl"
# Begins the names of a manifest's columns in the fingerprint of a cache.
MANIFEST_KEY = "dataset.manifest "
Key = tuple[int, ClipShape]
"""A clip, and the shape that it was cut to."""
ShapeName = Annotated[str, Field(pattern="^[0-9]{1,9}x[0-9]{1,9}x[0-9]{1,9}$")]
# A name in the folder itself.
ShardName = Annotated[str, Field(pattern="^shard-[0-9]{6,9}.safetensors$")]
Side = Annotated[int, Field(ge=1, lt=1 << 31)]


class DamagedRecordError(ValueError):
    """A record of a feature cache is not what was written. Unlike a corrupt clip, it ends a run."""


class Index(BaseModel):
    """Content of ``index.json``."""

    format: Literal[4] = 4

    made_of: dict[str, Any]
    """The fingerprint, see ``features.cached.made_of``."""

    source: dict[Literal["channels", "width", "max_length"], int]

    sizes: dict[ShapeName, tuple[Side, Side, Side]]
    """By shape, f, h, w."""

    shards: list[ShardName]


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


@dataclass(frozen=True)
class Shard:
    """The header of one shard file."""

    path: Path
    made_of: dict[str, Any]  # the fingerprint
    clips: dict[Key, tuple[float, int]]  # frame rate, and tokens of the caption
    corrupt: dict[Key, CorruptSample]

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read it without the tensors.

        Raises:
            ValueError: if the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        clips, corrupt = {}, {}
        try:
            with safe_open(path, "pt") as file:
                header = parse_json(file.metadata()["clips"], f"the header of {path}")
            for clip, shape, fps, tokens in header["clips"]:
                clips[int(clip), parse_shape(shape)] = float(fps), int(tokens)
            for clip, shape, source, reason in header["corrupt"]:
                corrupt[int(clip), parse_shape(shape)] = CorruptSample(source, reason)
            return cls(path, header["made_of"], clips, corrupt)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"got {str(path)!r}, which cannot be read ({error}); expected a shard of a feature "
                "cache; remove it and run opensora-sp precompute again"
            ) from None


class CachedFeatures(Dataset["CachedClip | CorruptSample"]):
    """Clips of a feature cache, indexed by ``Sample``. Corrupt ones are ``CorruptSample``s.

    ``Sample.frames`` count latent frames here, each of which can be read by itself.

    Args:
        extra: further inputs of the model, which the cache was made with.

    Attributes:
        sizes: of the latents of each shape: f, h, w.
        latents: by shape and clip, the shard and the frame rate.

    Raises:
        ValueError: if the cache is not finished, or its index or a header is damaged.
        KeyError: for a clip or a shape that was not requested when the cache was made.
    """

    def __init__(self, path: str, extra: ExtraFiles | None = None) -> None:
        self.folder, self.extra = Path(path), extra
        self.index = read_index(self.folder)
        self.rows = Manifest(self.folder / MANIFEST)
        self.sizes: dict[ClipShape, tuple[int, int, int]] = {}
        for shape_text, size in self.index.sizes.items():
            self.sizes[parse_shape(shape_text)] = size
        self.latents: dict[ClipShape, dict[int, tuple[Path, float]]] = {}
        self.corrupt: dict[Key, CorruptSample] = {}
        self._tokens: dict[int, int] = {}

        for name in self.index.shards:
            shard = Shard.read(self.folder / name)
            self.corrupt |= shard.corrupt
            for (clip, shape), (fps, tokens) in shard.clips.items():
                self.latents.setdefault(shape, {})[clip] = shard.path, fps
                # A caption does not depend on the shape that its clip was cut to.
                self._tokens[clip] = tokens

        # It would be found in the middle of a training.
        if not self.latents.keys() <= self.sizes.keys():
            raise damaged_index(self.folder, "clips without a size of latents")

    @property
    def fingerprint(self) -> dict[str, str]:
        """``Manifest.fingerprint`` of the manifest that the cache was made of."""
        columns = {}
        for name, summary in self.index.made_of.items():
            if name.startswith(MANIFEST_KEY):
                columns[name.removeprefix(MANIFEST_KEY)] = str(summary)
        return columns

    @property
    def index_digest(self) -> str:
        """A digest of the index, by which ranks compare their caches."""
        return hashlib.sha256((self.folder / INDEX).read_bytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, shape: ClipShape) -> np.ndarray:
        """The clips that have latents of a shape, or are known to be corrupt."""
        clips = sorted(self.latents.get(shape, {}))
        clips += [clip for clip, cut_to in self.corrupt if cut_to == shape]
        return np.array(clips, dtype=np.int64)

    def text_length(self, clip: int) -> int:
        """Tokens of a clip's caption; 0 for a clip that could not be read in any shape."""
        return self._tokens.get(clip, 0)

    def __getitem__(self, sample: Sample) -> CachedClip | CorruptSample:
        key = sample.clip, sample.shape
        if key in self.corrupt:
            return self.corrupt[key]

        shard, fps = self.latents[sample.shape][sample.clip]
        size = self.sizes[sample.shape]
        first, stop = sample.frames or (0, size[0])
        latents = read_record(shard, latents_name(key), slice(first, stop))
        # Other ranks of the group expect parts of these sizes.
        if latents.shape[1:] != (len(range(size[0])[first:stop]), *size[1:]):
            raise damaged_record(shard, latents_name(key), f"its shape is {(*latents.shape,)}")

        text, extra = None, dict[str, Tensor]()
        if first == 0:
            text = read_record(shard, f"text/{sample.clip}")
            extra = self._read_extra(shard, key)
        return CachedClip(latents, text, fps, extra)

    def _read_extra(self, shard: Path, key: Key) -> dict[str, Tensor]:
        """The further inputs of a clip, float32, by name."""
        inputs = {}
        shapes = {} if self.extra is None else self.extra.shapes_of(key[1])
        for name, shape in shapes.items():
            record = extra_name(key, name)
            inputs[name] = read_record(shard, record).float()
            if inputs[name].shape != shape:
                raise damaged_record(shard, record, f"its shape is {(*inputs[name].shape,)}")
        return inputs


def shard_content(
    made_of: dict[str, Any], clips: Mapping[Key, CachedClip], corrupt: Mapping[Key, CorruptSample]
) -> bytes:
    """The bytes of a shard file with these whole clips; a caption is kept once for each clip."""
    from safetensors.torch import save

    records: dict[str, Tensor] = {}
    header: dict[str, Any] = {"made_of": made_of, "clips": [], "corrupt": []}
    for key, clip in clips.items():
        assert clip.text is not None
        header["clips"].append([key[0], shape_name(key[1]), clip.fps, len(clip.text)])
        records[latents_name(key)] = in_fewest_bits(clip.latents)
        records[f"text/{key[0]}"] = in_fewest_bits(clip.text)
        for name, x in clip.extra.items():
            records[extra_name(key, name)] = in_fewest_bits(x)
    for (number, shape), sample in corrupt.items():
        header["corrupt"].append([number, shape_name(shape), sample.path, sample.reason])

    return save(records, {"clips": json.dumps(header)})


def latents_name(key: Key) -> str:
    """The record of a clip's latents."""
    return f"latents/{key[0]}/{shape_name(key[1])}"


def extra_name(key: Key, name: str) -> str:
    """The record of a further input of a clip."""
    return f"extra/{key[0]}/{shape_name(key[1])}/{name}"


def in_fewest_bits(x: Tensor) -> Tensor:
    """The same numbers on the CPU, in 16 bits where that loses nothing, as with bf16 encoders."""
    for dtype in (torch.bfloat16, torch.float16):
        # Compared rather than assumed: an encoder of the user's may return any float32.
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return x.to("cpu", dtype).contiguous()
    return x.cpu().contiguous()


def read_record(path: Path, name: str, frames: slice | None = None) -> Tensor:
    """A record of a shard, or some frames of latents.

    Raises:
        DamagedRecordError: if the shard cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            record: Tensor
            record = file.get_tensor(name) if frames is None else file.get_slice(name)[:, frames]
            return record
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise damaged_record(path, name, str(error)) from None


def damaged_record(path: Path, name: str, reason: str) -> DamagedRecordError:
    """The error of a record that is not the one that was written."""
    return DamagedRecordError(
        f"got the record {name!r} of {str(path)!r}, which is damaged ({reason}); expected what was "
        "written; remove this file and run opensora-sp precompute again, which encodes its clips "
        "anew"
    )


def read_index(folder: Path) -> Index:
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
    # Before it is read: a link could lead out of the folder, and a pipe would block.
    check_files(folder, [INDEX, MANIFEST])
    try:
        index = Index.model_validate(read_json(folder / INDEX))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise damaged_index(folder, f"damaged, or of another format: {reason}") from None
    except ValueError as error:
        raise damaged_index(folder, str(error)) from None

    check_files(folder, index.shards)
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
    absent, real_folder = [], folder.resolve()
    for name in names:
        if not (folder / name).resolve().is_relative_to(real_folder):
            raise ValueError(
                f"got the file {name!r} in the feature cache {str(folder)!r}, which leads out of "
                "this folder; expected files of the folder itself; do not use a cache from this "
                "source"
            )
        if not (folder / name).is_file():
            absent.append(name)

    if absent:
        raise ValueError(
            f"got the feature cache {str(folder)!r} without {len(absent)} of its files (the first "
            f"is {absent[0]!r}); expected all of them; copy the rest, or run opensora-sp "
            "precompute again, which encodes their clips anew"
        )


def shape_name(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape)


def parse_shape(name: str) -> ClipShape:
    return ClipShape(*(int(side) for side in name.split("x")))
