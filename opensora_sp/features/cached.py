"""Fingerprint of a feature cache, and the checks that it fits a config and holds its clips."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import numpy as np

from opensora_sp.config import TrainConfig
from opensora_sp.data.cache import CachedFeatures, Key, shape_name
from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.manifest import Manifest
from opensora_sp.data.sampler import BatchPlan, MicroBatch
from opensora_sp.encoders.loading import weights_digest
from opensora_sp.models.extra_inputs import resolved_axes

from .same_clips import by_name
from .sharded import MAX_SUBSTITUTES

# Options of a dataset that decide how its clips are cut.
CUT_BY = ("transform", "clip_start", "frame_interval")
# Options of an encoder that are not part of the fingerprint: they change no feature, or the
# weights' digest has them.
NOT_IN_FINGERPRINT = ("from_pretrained", "micro_batch_size", "offload")


def made_of(cfg: TrainConfig, rows: Manifest) -> dict[str, Any]:
    """The fingerprint of a feature cache: all that its features depend on, by config key.

    These are the encoders with digests of their weights, how clips are cut, the manifest, and
    further inputs of a derived model. The digest is None where an encoder's weights are not on this
    machine.
    """
    parts: dict[str, Any] = {}
    for key in ("vae", "text_encoder"):
        options = getattr(cfg, key)
        for name, option in options.items():
            if name not in NOT_IN_FINGERPRINT:
                parts[f"{key}.{name}"] = option
        source = options.get("from_pretrained")
        parts[f"{key}.weights"] = source and weights_digest(source, options.get("subfolder"))

    parts |= {f"dataset.{name}": getattr(cfg.dataset, name) for name in CUT_BY}
    parts |= by_name(rows.fingerprint)
    if cfg.extra_files is not None:
        spec = cfg.model_spec
        parts["model.extra_inputs"] = resolved_axes(spec.model_class.extra_inputs, spec.config)
    # Tuples become lists, as they are read back from the index.
    fingerprint: dict[str, Any] = json.loads(json.dumps(parts, default=str))
    return fingerprint


def check_made_of(made: dict[str, Any], wanted: dict[str, Any], folder: str) -> None:
    """Compare the fingerprint of the cache in ``folder`` with the fingerprint of a config.

    Raises:
        ValueError: naming every part that differs.
    """
    differing = []
    for key in sorted(made.keys() | wanted.keys()):
        ours, theirs = wanted.get(key), made.get(key)
        # Training from a cache loads no encoder, whose weights may be on another machine.
        is_elsewhere = key.endswith(".weights") and key in wanted and ours is None
        if ours != theirs and not is_elsewhere:
            differing.append(f"{key} {ours!r} (there {theirs!r})")

    if differing:
        raise ValueError(
            f"got {', '.join(differing)} with the feature cache {folder!r}; expected what it was "
            "made with (weights: files of the same bytes); change the config back, or make another "
            "cache of it: opensora-sp precompute CONFIG -o FOLDER"
        )


def check_cache(cfg: TrainConfig, dataset: CachedFeatures) -> None:
    """Raise ValueError unless the cache was made of what the config would encode."""
    if cfg.dataset.manifest is None:
        # The cache has its own copy of the manifest, with absolute paths and no further columns.
        own, recorded = dataset.rows.fingerprint, dataset.fingerprint
        of_others = {name: recorded[name] for name in recorded if name == "path" or name not in own}
        wanted = made_of(cfg, dataset.rows) | by_name(of_others)
    else:
        files = () if cfg.extra_files is None else cfg.extra_files.names
        remove_prefix = cfg.dataset.remove_caption_prefix
        rows = Manifest(cfg.dataset.manifest, files, remove_prefix=remove_prefix)
        wanted = made_of(cfg, rows)
    check_made_of(dataset.index.made_of, wanted, str(dataset.folder))


def check_clips(cfg: TrainConfig, dataset: CachedFeatures, plan: BatchPlan) -> None:
    """Raise ValueError unless the cache holds every clip that the run's steps use."""
    missing = {}
    for shape, clips in clips_used(plan, cfg.max_steps, dataset.corrupt.keys()).items():
        if count := len(np.setdiff1d(clips, dataset.known(shape))):
            missing[shape] = count
    if not missing:
        return

    sizes = f"image_size {cfg.size} and num_frames {cfg.num_frames}"
    asked = sizes if cfg.bucket_config is None else "bucket_config"
    lacks = ", ".join(f"{count} clips of {shape_name(shape)}" for shape, count in missing.items())
    folder, known = str(dataset.folder), [shape_name(shape) for shape in dataset.sizes]
    raise ValueError(
        f"got {asked} and max_steps {cfg.max_steps}, for which the feature cache {folder!r} lacks "
        f"{lacks}; expected all clips of the run, where it has some of the shapes {known}; run "
        f"opensora-sp precompute with this config -o {dataset.folder}, which adds them"
    )


def clips_used(plan: BatchPlan, steps: int, corrupt: Set[Key]) -> dict[ClipShape, np.ndarray]:
    """The clips that so many steps use in each shape, sorted, with substitutes of corrupt ones."""
    used: dict[ClipShape, set[int]] = {}
    for epoch, members in plan.epochs(steps):
        for shape, clips in members.items():
            in_epoch = set(clips.tolist())
            in_shape = used.setdefault(shape, set())
            in_shape.update(in_epoch)

            # Of a micro-batch, substitutes depend on epoch and shape alone.
            batch = MicroBatch(0, epoch, shape, (), 0.0)
            for clip, corrupt_shape in corrupt:
                if corrupt_shape == shape and clip in in_epoch:
                    in_shape.update(_substitutes(plan, batch, clip, corrupt))
    return {shape: np.array(sorted(clips), dtype=np.int64) for shape, clips in used.items()}


def _substitutes(plan: BatchPlan, batch: MicroBatch, clip: int, corrupt: Set[Key]) -> list[int]:
    """The clips that training tries in place of a corrupt one, until one is not corrupt."""
    tried = []
    for attempt in range(MAX_SUBSTITUTES):
        tried.append(plan.substitute(batch, clip, attempt))
        if (tried[-1], batch.shape) not in corrupt:
            break
    return tried
