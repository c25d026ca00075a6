"""Make a feature cache: encode once what the steps of a config's run would read and encode.

Ranks share the work by shards of some clips each. A shard file appears whole or not at all, so an
interrupted run resumes with the clips that no shard holds. Corrupt clips are listed with their
reasons, and the clips that training would substitute for them are encoded as well.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.common.console import RANK_LOCAL
from opensora_sp.common.files import check_writable
from opensora_sp.config import TrainConfig
from opensora_sp.data.cache import (
    INDEX,
    MANIFEST,
    CachedClip,
    Index,
    Key,
    Shard,
    check_files,
    shape_name,
    shard_content,
)
from opensora_sp.data.dataset import ClipShape, CorruptSample, VideoTextDataset
from opensora_sp.data.loader import LoadedBatch, RequestLoader
from opensora_sp.data.manifest import write_manifest
from opensora_sp.data.sampler import BatchPlan, MicroBatch, ReadRequest, whole_request
from opensora_sp.parallel import closing_process_group, drain_process_group
from opensora_sp.runtime.cost_models import cost_model_of
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
    """Write the feature cache of a config's run, or what is missing in it; every rank calls this.

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
    cut = cfg.dataset.transform, cfg.dataset.clip_start
    if cut != ("resize_center_crop", "middle") or cfg.noise_augmentation:
        raise ValueError(
            f"got dataset.transform {cut[0]!r}, clip_start {cut[1]!r} and noise_augmentation "
            f"{cfg.noise_augmentation} to keep in a feature cache; expected clips that are the "
            "same in every epoch; set dataset.transform=resize_center_crop "
            "dataset.clip_start=middle noise_augmentation=False, for the cache and the training"
        )

    if cfg.dataset.type == "CachedFeatures":
        raise ValueError(
            "got dataset.type 'CachedFeatures' to make a feature cache of; expected 'VideoText' or "
            "'VariableVideoText'; pass the config that reads the files"
        )


class CacheWriter:
    """Writes one rank's shards; rank 0 also the index. ``write`` is collective."""

    def __init__(
        self, cfg: TrainConfig, folder: Path, dataset: VideoTextDataset, encoders: Encoders
    ) -> None:
        self.cfg, self.folder, self.dataset, self.encoders = cfg, folder, dataset, encoders
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.disk = FileSystem()
        self.made_of = made_of(cfg, dataset.rows)

    def write(self, plan: BatchPlan) -> None:
        """Encode until everything that the run uses is written or corrupt; then write the index."""
        # Substitutes of corrupt clips may be corrupt in turn.
        while True:
            shards = self.shards()
            encoded: set[Key] = set().union(*(shard.clips for shard in shards))
            corrupt: set[Key] = set().union(*(shard.corrupt for shard in shards))
            done = encoded | corrupt
            todo: dict[int, list[ClipShape]] = {}
            for shape, clips in clips_used(plan, self.cfg.max_steps, corrupt).items():
                for clip in clips.tolist():
                    if (clip, shape) not in done:
                        todo.setdefault(clip, []).append(shape)
            if not todo:
                break
            self._write_shards(dict(sorted(todo.items())), shards)

        if not encoded:
            raise ValueError(
                f"got {len(self.dataset)} clips, none of which can be read; expected video files; "
                "check the manifest"
            )
        if self.rank == 0:
            self._write_index(shards, {shape for _, shape in done})
            message = "feature cache %s: latents of %d clips, %d corrupt"
            logger.info(message, self.folder, len(encoded), len(corrupt))

    def shards(self) -> list[Shard]:
        """All that are complete, in order.

        Raises:
            ValueError: if one is damaged, or was made of something else.
        """
        paths = sorted(self.folder.glob("shard-*.safetensors"))
        check_files(self.folder, [path.name for path in paths])
        shards = [Shard.read(path) for path in paths]
        for shard in shards:
            check_made_of(shard.made_of, self.made_of, str(shard.path))
        return shards

    def _write_shards(self, todo: dict[int, list[ClipShape]], shards: list[Shard]) -> None:
        """Write this rank's shards; the shards of all ranks together hold ``todo``. Collective."""
        clips = list(todo)
        parts = [clips[i : i + CLIPS_PER_SHARD] for i in range(0, len(clips), CLIPS_PER_SHARD)]
        # Shards are distributed in turn, so that ranks end together.
        requests = {}
        for number in range(self.rank, len(parts), self.world):
            requests[number] = _requests({clip: todo[clip] for clip in parts[number]})

        loader = RequestLoader(
            self.dataset,
            list(chain.from_iterable(requests.values())),
            num_workers=self.cfg.num_workers,
            seed=self.cfg.seed,
            worker_init_fn=init_worker,
            time_limit=self.cfg.dataset.time_limit,
        )
        answers = loader.answers()
        # All ranks have listed the same shards before one writes a new one.
        dist.barrier()
        self.disk.mkdir(self.folder)
        first = 1 + max((int(shard.path.stem.split("-")[1]) for shard in shards), default=-1)
        for number, requests_of_shard in requests.items():
            self._write_shard(first + number, requests_of_shard, answers)
            logger.info("feature cache: shard %d of %d", number + 1, len(parts))
        dist.barrier()

    @torch.no_grad()
    def _write_shard(
        self, number: int, requests: Sequence[ReadRequest], answers: Iterator[LoadedBatch]
    ) -> None:
        """Encode the clips of one shard, whose batches come next in ``answers``."""
        clips: dict[Key, CachedClip] = {}
        corrupt: dict[Key, CorruptSample] = {}
        for request in requests:
            read = {}
            for sample, clip in zip(request.samples, next(answers).items, strict=True):
                key = sample.clip, sample.shape
                if isinstance(clip, CorruptSample):
                    corrupt[key] = clip
                    message = "skipped in the feature cache: %s (%s)"
                    logger.warning(message, clip.path, clip.reason, extra=RANK_LOCAL)
                else:
                    read[key] = clip

            latents = self.encoders.latents(list(read.values()))
            texts = self.encoders.text_features(list(read.values()))
            for (key, clip), z, text in zip(read.items(), latents, texts, strict=True):
                clips[key] = CachedClip(z.cpu(), text.cpu(), clip.fps, clip.extra)

        path = self.folder / f"shard-{number:06d}.safetensors"
        self.disk.write_file(path, shard_content(self.made_of, clips, corrupt))

    def _write_index(self, shards: list[Shard], shapes: set[ClipShape]) -> None:
        # Absolute, so that the cache can be moved.
        entries = (
            entry._replace(path=Path(os.path.realpath(entry.path))) for entry in self.dataset.rows
        )
        write_manifest(self.folder / MANIFEST, entries)
        index = Index(
            made_of=self.made_of,
            source={
                "channels": self.encoders.channels,
                "width": self.encoders.width,
                "max_length": self.encoders.max_length,
            },
            sizes={shape_name(shape): self.encoders.latent_size(shape) for shape in sorted(shapes)},
            shards=[shard.path.name for shard in shards],
        )
        text = index.model_dump_json() + "\n"
        self.disk.write_file(self.folder / INDEX, text.encode())


def _requests(todo: dict[int, list[ClipShape]]) -> list[ReadRequest]:
    """Requests to read and encode clips of one shape together, as many as fit."""
    by_shape: dict[ClipShape, list[int]] = {}
    for clip, shapes in todo.items():
        for shape in shapes:
            by_shape.setdefault(shape, []).append(clip)

    requests = []
    for shape, clips in sorted(by_shape.items()):
        size = max(1, PIXELS_PER_BATCH // math.prod(shape))
        for first in range(0, len(clips), size):
            ids = tuple(clips[first : first + size])
            requests.append(whole_request(MicroBatch(0, 0, shape, ids, 0.0)))
    return requests
