"""Make a feature cache: encode once what the steps of a config's run would read and encode.

Ranks share the work by shards of some clips each. A shard file appears whole or not at all, so an
interrupted run resumes with the clips that no shard holds. Corrupt clips are listed with their
reasons and tried again by the next run. Clips that training would substitute for them are encoded
as well.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from opensora_sp.checkpoint import FileSystem
from opensora_sp.common.console import RANK_LOCAL
from opensora_sp.common.files import check_writable
from opensora_sp.config import TrainConfig
from opensora_sp.data import (
    BatchPlan,
    CachedFeatures,
    Clip,
    ClipShape,
    CorruptSample,
    Sample,
    VideoTextDataset,
    write_manifest,
)
from opensora_sp.data.cache_files import (
    FORMAT,
    INDEX,
    MANIFEST,
    MANIFEST_CHECKSUM,
    FileState,
    Key,
    Shard,
    ShardContent,
    check_files,
    file_checksum,
    sealed,
    shape_name,
)
from opensora_sp.parallel import closing_process_group, drain_process_group
from opensora_sp.runtime.cost_model_file import cost_model_of
from opensora_sp.runtime.processes import init_worker
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.timeouts import backend_timeout
from opensora_sp.runtime.watchdog import Watchdog

from .build import make_dataset, make_encoders, make_plan, micro_batches_of_step, with_length
from .cached import check_made_of, clips_used, made_of
from .same_clips import agree_on_clips, by_name
from .sources import Encoders

logger = logging.getLogger(__name__)
CLIPS_PER_SHARD = 64
# Of clips that are encoded together; a larger clip is encoded alone.
PIXELS_PER_BATCH = 1 << 25


def precompute(cfg: TrainConfig, folder: str) -> Path:
    """Write the feature cache of a config's run, or resume writing it; every rank calls this.

    It holds the clips of ``cfg.max_steps`` steps, with the ``micro_batches_per_step`` of a run on
    as many processes.

    Returns:
        The folder, for ``dataset=dict(type="CachedFeatures", path=...)``.

    Raises:
        ValueError: if clips are cut at random, the folder has a cache that was made of something
            else, or no clip can be read.
    """
    with raise_on_all_ranks():
        check_reproducible(cfg)
        check_writable(Path(folder), "the folder of a feature cache")
        dataset = make_dataset(cfg)
        compared = cfg.model_dump(mode="json") | cost_model_of(cfg.cost_model).as_settings()
    assert isinstance(dataset, VideoTextDataset)

    store = join_rendezvous(compared)
    watchdog = Watchdog(
        store,
        peer_timeout=cfg.peer_timeout,
        collective_timeout=cfg.collective_timeout,
        grace_time=0.0,
    )
    with closing_process_group(), watchdog:
        timeout = backend_timeout(cfg.collective_timeout)
        device = start_process_group(store, timeout=timeout, alone=True)
        agree_on_clips(by_name(dataset.fingerprint))
        plan = make_plan(cfg, dataset, micro_batches_of_step(cfg, {}, dist.get_world_size()))
        encoders = make_encoders(cfg, device)
        cache = CacheWriter(with_length(cfg, plan), Path(folder), dataset, encoders)
        cache.write(plan)
        drain_process_group()
    return cache.folder


def check_reproducible(cfg: TrainConfig) -> None:
    """Raise ValueError if a clip is not the same in every epoch, or comes from a cache itself."""
    fixed = ("resize_center_crop", "middle")
    if (cfg.dataset.transform, cfg.dataset.clip_start) != fixed:
        raise ValueError(
            f"got dataset.transform {cfg.dataset.transform!r} and clip_start "
            f"{cfg.dataset.clip_start!r} to keep in a feature cache; expected clips that are the "
            "same in every epoch; set dataset.transform=resize_center_crop "
            "dataset.clip_start=middle, for the cache and for the training"
        )

    if cfg.noise_augmentation:
        raise ValueError(
            "got noise_augmentation for a feature cache; expected clips that are the same in every "
            "epoch; remove noise_augmentation, or train without a cache"
        )

    if cfg.dataset.type == "CachedFeatures":
        raise ValueError(
            "got dataset.type 'CachedFeatures' to make a feature cache of; expected 'VideoText' or "
            "'VariableVideoText'; pass the config that reads the files"
        )


class CacheWriter:
    """Writes one rank's shards; rank 0 also the index. Creating and ``write`` are collective."""

    def __init__(
        self, cfg: TrainConfig, folder: Path, dataset: VideoTextDataset, encoders: Encoders
    ) -> None:
        self.cfg, self.folder, self.dataset, self.encoders = cfg, folder, dataset, encoders
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.disk = FileSystem()
        self.made_of = made_of(cfg, dataset.rows)

        self.former = self.shards()
        # No rank writes before all have checked.
        dist.barrier()
        if self.rank == 0:
            self.disk.mkdir(folder)
        dist.barrier()

    def write(self, plan: BatchPlan) -> None:
        """Encode until everything that the run uses is written or corrupt; then write the index."""
        shards, changed = self.former, self._changed()
        encoded_before: set[Key] = set().union(*(shard.fps for shard in self.former))
        # Substitutes of corrupt clips may be corrupt in turn.
        while True:
            new_shards = shards[len(self.former) :]
            new: set[Key] = set().union(*(shard.fps for shard in new_shards))
            encoded = (encoded_before - changed) | new
            # What a former run has found to be corrupt is tried again.
            corrupt: set[Key] = set().union(*(shard.corrupt for shard in new_shards))
            used = clips_used(plan, self.cfg.max_steps, corrupt - encoded)

            done = encoded | corrupt
            todo: dict[int, list[ClipShape]] = {}
            for shape, clips in used.items():
                for clip in clips.tolist():
                    if (clip, shape) not in done:
                        todo.setdefault(clip, []).append(shape)
            if not todo:
                break
            self._write_shards(dict(sorted(todo.items())), shards)
            shards = self.shards()

        if not encoded:
            raise ValueError(
                f"got {len(self.dataset)} clips, none of which can be read; expected video files; "
                "check the manifest"
            )
        if self.rank == 0:
            self._write_index(list(used), shards, changed - new)

    def shards(self) -> list[Shard]:
        """All that are complete, in order.

        Raises:
            ValueError: if one is damaged, or was made of something else.
        """
        paths = sorted(self.folder.glob("shard-*.safetensors"))
        if paths:
            check_files(self.folder, [path.name for path in paths])
        shards = [Shard.read(path) for path in paths]
        for shard in shards:
            check_made_of(shard.made_of, self.made_of, str(shard.path))
        return shards

    def _changed(self) -> set[Key]:
        """Encoded clips whose files have another content now. Collective."""
        states: dict[Key, list[FileState]] = {}
        for shard in self.former:
            states |= shard.files

        compared = sorted(states)[self.rank :: self.world]
        differing = [key for key in compared if not self._has_states(key[0], states[key])]
        gathered: list[list[Key]] = [[] for _ in range(self.world)]
        dist.all_gather_object(gathered, differing)

        changed = set(chain.from_iterable(gathered))
        if changed:
            message = "%d clips of %s have other files than were encoded: they are encoded again"
            logger.warning(message, len(changed), self.folder)
        return changed

    def _has_states(self, clip: int, states: list[FileState]) -> bool:
        pairs = zip(states, self._files(clip), strict=True)
        return all(state.is_of(path) for state, path in pairs)

    def _files(self, clip: int) -> list[Path]:
        """The files that are read for a clip."""
        rows = self.dataset.rows
        return [rows[clip].path, *rows.files_of(clip).values()]

    def _write_shards(self, todo: dict[int, list[ClipShape]], shards: list[Shard]) -> None:
        """Write this rank's shards; the shards of all ranks together hold ``todo``. Collective."""
        with_caption: set[int] = set().union(*(shard.texts for shard in shards))
        clips = list(todo)
        parts = [clips[i : i + CLIPS_PER_SHARD] for i in range(0, len(clips), CLIPS_PER_SHARD)]
        # Shards are distributed in turn, so that ranks end together.
        batches = {}
        for number in range(self.rank, len(parts), self.world):
            batches[number] = self._batches({clip: todo[clip] for clip in parts[number]})

        loader = iter(
            DataLoader(
                self.dataset,
                batch_sampler=list(chain.from_iterable(batches.values())),
                collate_fn=list,
                num_workers=self.cfg.num_workers,
                # As StepLoader's.
                multiprocessing_context="fork" if self.cfg.num_workers else None,
                generator=torch.Generator().manual_seed(self.cfg.seed),
                worker_init_fn=init_worker,
            )
        )
        # All ranks have listed the same shards before one writes a new one.
        dist.barrier()
        newest = _number(shards[-1].path) if shards else -1
        for number, batches_of_shard in batches.items():
            self._write_shard(newest + 1 + number, batches_of_shard, loader, with_caption)
            done, total = len(shards) + number + 1, len(shards) + len(parts)
            logger.info("feature cache: shard %d of %d", done, total)
        dist.barrier()

    def _batches(self, todo: dict[int, list[ClipShape]]) -> list[list[Sample]]:
        """Batches to read and encode together: clips of one shape, as many as fit."""
        by_shape: dict[ClipShape, list[int]] = {}
        for clip, shapes in todo.items():
            for shape in shapes:
                by_shape.setdefault(shape, []).append(clip)

        batches = []
        for shape, clips in sorted(by_shape.items()):
            size = max(1, PIXELS_PER_BATCH // math.prod(shape))
            for first in range(0, len(clips), size):
                batches.append([Sample(clip, 0, shape) for clip in clips[first : first + size]])
        return batches

    @torch.no_grad()
    def _write_shard(
        self,
        number: int,
        batches: list[list[Sample]],
        loader: Iterator[list[Any]],
        with_caption: set[int],
    ) -> None:
        """Encode the clips of one shard, and the captions not yet in ``with_caption``."""
        content = ShardContent(self.made_of)
        for samples in batches:
            read: dict[Key, Clip] = {}
            for sample, clip in zip(samples, next(loader), strict=True):
                if isinstance(clip, CorruptSample):
                    content.corrupt[sample.clip, sample.shape] = clip.path, clip.reason
                    message = "skipped in the feature cache: %s (%s)"
                    logger.warning(message, clip.path, clip.reason, extra=RANK_LOCAL)
                else:
                    read[sample.clip, sample.shape] = clip

            encoded = self.encoders.latents(list(read.values()))
            content.latents |= zip(read, (z.cpu() for z in encoded), strict=True)
            content.fps |= {key: clip.fps for key, clip in read.items()}
            content.extra |= {key: clip.extra for key, clip in read.items()}
            for key in read:
                content.files[key] = [FileState.of(path) for path in self._files(key[0])]

            new = {key[0]: clip for key, clip in read.items() if key[0] not in with_caption}
            content.texts |= zip(new, self.encoders.text_features(list(new.values())), strict=True)
            with_caption.update(new)

        path = self.folder / f"shard-{number:06d}.safetensors"
        self.disk.write_file(path, content.to_bytes())

    def _write_index(self, used: list[ClipShape], shards: list[Shard], outdated: set[Key]) -> None:
        shapes = set(used)
        for shard in shards:
            shapes.update(shape for _, shape in shard.fps)

        # Absolute, so that the cache can be moved.
        entries = (
            entry._replace(path=Path(os.path.realpath(entry.path))) for entry in self.dataset.rows
        )
        write_manifest(self.folder / MANIFEST, entries)
        source = {}
        for name in ("channels", "width", "max_length"):
            source[name] = getattr(self.encoders, name)
        sizes = {}
        for shape in sorted(shapes):
            sizes[shape_name(shape)] = self.encoders.latent_size(shape)
        index = {
            "format": FORMAT,
            "made_of": self.made_of,
            "source": source,
            "sizes": sizes,
            "shards": {shard.path.name: shard.checksum for shard in shards},
            # Their files have another content now.
            "outdated": [[clip, shape_name(shape)] for clip, shape in sorted(outdated)],
            "manifest_columns": self.dataset.fingerprint,
            MANIFEST_CHECKSUM: file_checksum(self.folder / MANIFEST),
        }
        self.disk.write_file(self.folder / INDEX, (json.dumps(sealed(index)) + "\n").encode())

        cache = CachedFeatures(str(self.folder))
        logger.info(
            "feature cache %s: latents of %d clips in %d shapes, %d captions, %d corrupt",
            self.folder,
            sum(map(len, cache.latents.values())),
            len(cache.sizes),
            len(cache.texts),
            len(cache.corrupt),
        )


def _number(shard: Path) -> int:
    return int(shard.stem.removeprefix("shard-"))
