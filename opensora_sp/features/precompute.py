"""Make a feature cache: what the steps of a config's run would read and encode, written down once.

Ranks share the work by shards, each of some clips. A shard appears whole or not at all, so an interrupted run goes on
with the clips that none holds. Broken clips are listed with their reasons, and tried again by the next run; what the
training would take in their place is encoded as well.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from opensora_sp.checkpoint import Disk
from opensora_sp.config import TrainConfig
from opensora_sp.console import RANK_LOCAL
from opensora_sp.data import (
    BatchPlan,
    BrokenClip,
    Clip,
    ClipShape,
    Sample,
    VideoTextDataset,
    write_manifest,
)
from opensora_sp.data.cache import INDEX, MANIFEST, Key, Shard, index_of, shard_bytes
from opensora_sp.parallel import closing_process_group, drain_process_group
from opensora_sp.runtime import Watchdog, backend_timeout, raise_on_all_ranks

from .build import make_dataset, make_encoders, make_plan, with_length
from .cached import check_made_of, clips_used, made_of
from .sharded import Encoders

logger = logging.getLogger(__name__)
CLIPS_A_SHARD = 64
PIXELS_AT_A_TIME = 1 << 25  # of clips that are encoded together, or one clip
UNFINISHED = "made_of.json"  # the fingerprint, until there is an index


def precompute(cfg: TrainConfig, folder: str) -> Path:
    """Write, or go on writing, the feature cache of a config's run; every rank calls it.

    It holds what ``cfg.max_steps`` steps take, with ``micro_batches_per_step`` as for as many processes as there are.

    Returns:
        The folder, for ``dataset=dict(type="CachedFeatures", path=...)``.

    Raises:
        ValueError: if clips are cut at random, the folder has a cache that was made of something else, or no clip can
            be read.
    """
    from opensora_sp.plugin import current_device, launch

    with raise_on_all_ranks():
        check_kept(cfg)
        dataset = make_dataset(cfg)
    assert isinstance(dataset, VideoTextDataset)
    launch(cfg.seed, cfg.model_dump(mode="json"), timeout=backend_timeout(cfg.collective_timeout))
    limits = dict(
        peer_timeout=cfg.peer_timeout, collective_timeout=cfg.collective_timeout, grace_time=0.0
    )
    with closing_process_group(), Watchdog(**limits):
        replicas = max(1, dist.get_world_size() // cfg.sp_size)
        plan = make_plan(cfg, dataset, cfg.micro_batches_per_step or replicas)
        encoders = make_encoders(cfg, current_device())
        cache = CacheWriter(with_length(cfg, plan), Path(folder), dataset, encoders)
        cache.write(plan)
        drain_process_group()
    return cache.folder


def check_kept(cfg: TrainConfig) -> None:
    """Raise ValueError if a clip is not the same in every epoch, or comes from a cache itself."""
    kept = ("resize_center_crop", "middle")
    if (cfg.dataset.transform, cfg.dataset.clip_start) != kept:
        raise ValueError(
            f"got dataset.transform {cfg.dataset.transform!r} and clip_start {cfg.dataset.clip_start!r} to keep in a "
            "feature cache; expected clips that are the same in every epoch; set dataset.transform=resize_center_crop "
            "dataset.clip_start=middle, for the cache and for the training"
        )
    if cfg.dataset.type == "CachedFeatures":
        raise ValueError(
            "got dataset.type 'CachedFeatures' to make a feature cache of; expected 'VideoText' or "
            "'VariableVideoText'; pass the config that reads the files"
        )


class CacheWriter:
    """Writes the shards of one rank; rank 0 also what there is once. Creating and ``write`` are collective."""

    def __init__(
        self, cfg: TrainConfig, folder: Path, dataset: VideoTextDataset, encoders: Encoders
    ) -> None:
        self.cfg, self.folder, self.dataset, self.encoders = cfg, folder, dataset, encoders
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.disk = Disk()
        self.made_of = made_of(cfg, dataset.rows)
        begun = [path for path in (folder / INDEX, folder / UNFINISHED) if path.is_file()]
        if begun:
            told = json.loads(begun[0].read_text())
            check_made_of(told["made_of"], self.made_of, str(folder))
        dist.barrier()  # nobody writes before all have looked
        if self.rank == 0:
            self.disk.mkdir(folder)
            self.disk.write_file(folder / UNFINISHED, _json({"made_of": self.made_of}))
        dist.barrier()
        self.first = len(self._names())  # shards of earlier runs

    def write(self, plan: BatchPlan) -> None:
        """Encode until everything that the run would take is there, or known to be broken; then write the index."""
        while True:
            shards = self.shards()
            at = {key for shard in shards for key in shard.fps}
            broken: dict[ClipShape, set[int]] = {}
            for clip, shape in (
                key for shard in shards[self.first :] for key in shard.broken if key not in at
            ):
                broken.setdefault(shape, set()).add(clip)
            used = clips_used(plan, self.cfg.max_steps, broken)
            todo: dict[int, list[ClipShape]] = {}
            for shape, clips in used.items():
                for clip in clips.tolist():
                    if (clip, shape) not in at and clip not in broken.get(shape, ()):
                        todo.setdefault(clip, []).append(shape)
            if not todo:
                break
            self._write_shards(
                dict(sorted(todo.items())), {clip for s in shards for clip in s.texts}, len(shards)
            )
        if not at:
            raise ValueError(
                f"got {len(self.dataset)} clips, none of which can be read; expected video files; check the manifest"
            )
        if self.rank == 0:
            self._write_index(list(used), shards)

    def shards(self) -> list[Shard]:
        """All that are complete, in order."""
        return [Shard.read(self.folder / name) for name in self._names()]

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("shard-*.safetensors"))

    def _write_shards(
        self, todo: dict[int, list[ClipShape]], texts: set[int], written: int
    ) -> None:
        """One shard after the other of this rank's; all ranks' together hold ``todo``, or say why not. Collective."""
        clips = list(todo)
        parts = [clips[i : i + CLIPS_A_SHARD] for i in range(0, len(clips), CLIPS_A_SHARD)]
        mine = range(self.rank, len(parts), self.world)
        newest = max((int(re.sub(r"\D", "", name)) for name in self._names()), default=-1)
        dist.barrier()  # all have seen the same names
        batches = [
            list(self._batches({clip: todo[clip] for clip in parts[number]})) for number in mine
        ]
        loader = iter(
            DataLoader(
                self.dataset,
                batch_sampler=[batch for of_shard in batches for batch in of_shard],
                collate_fn=list,
                num_workers=self.cfg.num_workers,
                generator=torch.Generator().manual_seed(self.cfg.seed),
            )
        )
        for number, of_shard in zip(mine, batches, strict=True):
            self._write_shard(newest + 1 + number, of_shard, loader, texts)
            logger.info("feature cache: shard %d of %d", written + number + 1, written + len(parts))
        dist.barrier()

    def _batches(self, todo: dict[int, list[ClipShape]]) -> Iterator[list[Sample]]:
        """What is read and encoded together: clips of one shape, as many as fit."""
        for shape in sorted({shape for shapes in todo.values() for shape in shapes}):
            clips = [clip for clip, shapes in todo.items() if shape in shapes]
            size = max(1, PIXELS_AT_A_TIME // (shape.num_frames * shape.height * shape.width))
            for first in range(0, len(clips), size):
                yield [Sample(clip, 0, shape) for clip in clips[first : first + size]]

    @torch.no_grad()
    def _write_shard(
        self, number: int, batches: list[list[Sample]], loader: Any, texts: set[int]
    ) -> None:
        latents: dict[Key, torch.Tensor] = {}
        fps: dict[Key, float] = {}
        broken: dict[Key, tuple[str, str]] = {}
        captions: dict[int, torch.Tensor] = {}
        for samples in batches:
            read: dict[Key, Clip] = {}
            for sample, item in zip(samples, next(loader), strict=True):
                if isinstance(item, BrokenClip):
                    broken[sample.clip, sample.shape] = item.path, item.reason
                    why = "left out of the feature cache: %s (%s)"
                    logger.warning(why, item.path, item.reason, extra=RANK_LOCAL)
                else:
                    read[sample.clip, sample.shape] = item
            latents |= zip(
                read, (z.cpu() for z in self.encoders.latents(list(read.values()))), strict=True
            )
            fps |= {key: clip.fps for key, clip in read.items()}
            new = {
                clip: item
                for (clip, _), item in read.items()
                if clip not in texts and clip not in captions
            }
            if new:
                for clip, y, mask in zip(
                    new, *self.encoders.texts(list(new.values())), strict=True
                ):
                    captions[clip] = y[0, : int(mask.sum())]
        path = self.folder / f"shard-{number:06d}.safetensors"
        self.disk.write_file(path, shard_bytes(latents, fps, captions, broken))

    def _write_index(self, shapes: list[ClipShape], shards: list[Shard]) -> None:
        shapes = sorted({*shapes, *(shape for shard in shards for _, shape in shard.fps)})
        entries = (entry._replace(path=entry.path.resolve()) for entry in self.dataset.rows)
        write_manifest(self.folder / MANIFEST, entries)
        source = {
            name: getattr(self.encoders, name) for name in ("channels", "width", "max_length")
        }
        index = index_of(
            self.made_of, source, {s: self.encoders.latent_size(s) for s in shapes}, shards
        )
        self.disk.write_file(self.folder / INDEX, _json(index))
        self.disk.unlink(self.folder / UNFINISHED)
        held = sum(len(one["clips"]) for one in index["latents"].values())
        told = "feature cache %s: latents of %d clips in %d shapes, %d captions, %d broken"
        logger.info(
            told, self.folder, held, len(shapes), len(index["texts"]["clips"]), len(index["broken"])
        )


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()
