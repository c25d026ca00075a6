"""Training from a feature cache: what its features were made of, whether that is what a config asks for, and how they
come to the model in place of encoders.

Legend: c latent channels, f x h x w latent size, L text tokens, W their width.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora_sp.config import TrainConfig
from opensora_sp.data import BatchPlan, CachedClip, CachedFeatures, ClipShape, Manifest, MicroBatch
from opensora_sp.data.cache import shape_name
from opensora_sp.encoders import Piece
from opensora_sp.encoders.loading import weights_digest

from .sharded import MAX_REPLACEMENTS

logger = logging.getLogger(__name__)
CUT_BY = ("transform", "clip_start", "frame_interval")  # of a dataset: what its clips depend on
NOT_TOLD = (
    "from_pretrained",
    "micro_batch_size",
    "offload",
)  # of an encoder: what changes nothing, or is the digest's


class CachedSource:
    """A ``features.Source`` of ``CachedClip``s: there is nothing to encode, and latent frames stand alone."""

    def __init__(self, dataset: CachedFeatures, device: torch.device) -> None:
        self.dataset, self.sizes, self.device = dataset, dataset.sizes, device
        told = dataset.index["source"]
        self.channels, self.width, self.max_length = (
            told["channels"],
            told["width"],
            told["max_length"],
        )

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        return self.sizes[shape]

    def pieces(self, shape: ClipShape) -> list[Piece]:
        return [Piece(slice(i, i + 1), slice(i, i + 1)) for i in range(self.latent_size(shape)[0])]

    def latents(self, items: Sequence[CachedClip]) -> list[Tensor]:
        return [item.latents.to(self.device).float() for item in items]

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        return [self.dataset.text_length(clip) for clip in clips]

    def texts(self, items: Sequence[CachedClip]) -> tuple[Tensor, Tensor]:
        y = torch.zeros(len(items), 1, self.max_length, self.width, device=self.device)
        mask = torch.zeros(len(items), self.max_length, dtype=torch.int64)
        for place, item in enumerate(items):
            assert item.text is not None
            y[place, 0, : len(item.text)] = item.text.to(self.device)
            mask[place, : len(item.text)] = 1
        return y, mask


def made_of(cfg: TrainConfig, rows: Manifest) -> dict[str, Any]:
    """What the features of a config's clips depend on, by the config's keys: encoders with their weights, how clips are
    cut, and the manifest. The weights of an encoder are None where they are not on this machine."""
    told: dict[str, Any] = {}
    for key in ("vae", "text_encoder"):
        options = getattr(cfg, key)
        told |= {f"{key}.{name}": value for name, value in options.items() if name not in NOT_TOLD}
        source = options.get("from_pretrained")
        told[f"{key}.weights"] = source and weights_digest(source, options.get("subfolder"))
    told |= {f"dataset.{name}": getattr(cfg.dataset, name) for name in CUT_BY}
    told["dataset.manifest"] = manifest_digest(rows)
    return json.loads(
        json.dumps(told, default=str)
    )  # tuples as lists, as they come back from the index


def manifest_digest(rows: Manifest) -> str:
    """Of paths, captions and sizes, in their order."""
    digest = hashlib.sha256()
    for column in (rows.paths, rows.texts):
        for line in column:
            digest.update(f"{line}\0".encode())
    for name in ("num_frames", "height", "width"):
        digest.update(rows.column(name).tobytes())
    return digest.hexdigest()


def check_made_of(found: dict[str, Any], wanted: dict[str, Any], folder: str) -> None:
    """Compare the fingerprint of the cache in ``folder`` with that of a config.

    Raises:
        ValueError: naming every part that differs.
    """
    unknown = [
        key
        for key, value in wanted.items()
        if key.endswith(".weights") and value is None and found.get(key)
    ]
    for key in unknown:
        logger.info(
            "%s are not on this machine: not compared with those that the feature cache was made with",
            key,
        )
    differing = [
        f"{key} {wanted.get(key)!r} (there {found.get(key)!r})"
        for key in sorted(found.keys() | wanted.keys())
        if key not in unknown and found.get(key) != wanted.get(key)
    ]
    if differing:
        raise ValueError(
            f"got {', '.join(differing)} with the feature cache {folder!r}; expected what it was made with; change the "
            "config back, or make another cache of it: scripts/precompute.py CONFIG -o FOLDER"
        )


def check_cache(cfg: TrainConfig, dataset: CachedFeatures) -> None:
    """Raise ValueError unless the cache was made of what the config would encode."""
    found = dataset.index["made_of"]
    wanted = made_of(cfg, dataset.rows)
    wanted["dataset.manifest"] = found["dataset.manifest"]
    if cfg.dataset.manifest is not None:
        wanted["dataset.manifest"] = manifest_digest(Manifest(cfg.dataset.manifest))
    check_made_of(found, wanted, str(dataset.folder))


def check_clips(cfg: TrainConfig, dataset: CachedFeatures, plan: BatchPlan) -> None:
    """Raise ValueError unless the cache holds every clip that the run's steps take."""
    broken = {shape: set(clips) for shape, clips in dataset.broken.items()}
    lacking = {}
    for shape, clips in clips_used(plan, cfg.max_steps, broken).items():
        if missing := len(np.setdiff1d(clips, dataset.known(shape))):
            lacking[shape_name(shape)] = missing
    if lacking:
        sizes = f"image_size {cfg.size} and num_frames {cfg.num_frames}"
        asked = sizes if cfg.bucket_config is None else "bucket_config"
        told = ", ".join(f"{count} clips of {shape}" for shape, count in lacking.items())
        folder, known = str(dataset.folder), [shape_name(shape) for shape in dataset.sizes]
        raise ValueError(
            f"got {asked} and max_steps {cfg.max_steps}, for which the feature cache {folder!r} lacks {told}; expected "
            f"all clips of the run, where it has some of the shapes {known}; run "
            f"scripts/precompute.py with this config -o {dataset.folder}, which adds them"
        )


def clips_used(
    plan: BatchPlan, steps: int, broken: dict[ClipShape, set[int]]
) -> dict[ClipShape, np.ndarray]:
    """The clips that a run of so many steps takes in each shape, in order, with those that replace broken ones."""
    found: dict[ClipShape, list[np.ndarray]] = {}
    for epoch, members in plan.epochs(steps):
        for shape, clips in members.items():
            replacements = []
            batch = MicroBatch(0, epoch, shape, (), 0.0)
            for index in (
                sorted(broken.get(shape, set()) & set(clips.tolist())) if shape in broken else ()
            ):
                for attempt in range(MAX_REPLACEMENTS):
                    replacements.append(plan.replacement(batch, index, attempt))
                    if replacements[-1] not in broken[shape]:
                        break
            found.setdefault(shape, []).extend([clips, np.array(replacements, dtype=np.int64)])
    return {shape: np.unique(np.concatenate(parts)) for shape, parts in found.items()}
