"""The evaluation run: load a model, measure bucket by bucket, report means over seeds."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.checkpoint import find_weights
from opensora_sp.checkpoint.adapters import find_adapters
from opensora_sp.checkpoint.model_config import check_model_config
from opensora_sp.checkpoint.paths import newest_checkpoint
from opensora_sp.checkpoint.reader import saved_config
from opensora_sp.checkpoint.writer import on_rank_0
from opensora_sp.common.files import read_json
from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.config.launch_checks import check_launch
from opensora_sp.config.load import saved_train_config
from opensora_sp.data.bucket_plan import BucketPlan
from opensora_sp.data.buckets import Buckets
from opensora_sp.data.dataset import ClipShape, VideoTextDataset
from opensora_sp.features.batch import BatchMaker
from opensora_sp.features.build import make_encoders
from opensora_sp.features.same_clips import agree_on_clips, by_name
from opensora_sp.parallel import SequenceMesh, closing_process_group, drain_process_group
from opensora_sp.runtime.cost_models import cost_model_of
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog
from opensora_sp.sampling.run import (
    found_at,
    load_model,
    opened_adapters,
    resolved_sources,
    verify_parts,
)

from .heldout import HeldoutLoss, none_readable, open_clips

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What to evaluate.

    Attributes:
        ckpt: weights: a run's folder, a checkpoint, or with ``config`` any file or folder. Of a run
            that trained LoRA adapters, these are merged into the weights of its ``load``.
        config: a training config with encoders, sizes and scheduler; None takes the checkpoint's.
        overrides: ``key=value`` texts that override the config.
        seeds: number of draws of noise and timesteps; the first is the seed of validation.
        sp_size: ranks that share a batch; None takes the config's where it is a number that
            divides the number of processes, else 1.
        use_ema: evaluate the EMA weights of a checkpoint.
        lora: further adapters to merge, each ``PATH`` or ``PATH:SCALE``.
    """

    ckpt: str
    manifest: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    bins: int = 10
    seeds: int = 3
    sp_size: int | None = None
    use_ema: bool = True
    allow_pickle: bool = False
    lora: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Clips that can be cut to the shapes of a bucket, by shape."""

    name: str
    batch_size: int
    clips: dict[ClipShape, list[int]]


def evaluate(settings: Settings) -> Evaluation:
    """Measure the held-out loss on any number of processes; the same result on every rank.

    Every clip is measured in each bucket whose size and length it has.

    Raises:
        ValueError: before a model exists, if settings, checkpoint, clips and processes do not fit;
            later, on every rank, if no clip can be read.
    """
    with raise_on_all_ranks():
        cfg, sources, dataset, buckets = preflight(settings)
        compared = compared_settings(settings, cfg, sources)
    store = join_rendezvous(compared)

    with closing_process_group(), Watchdog(store, grace_time=0):
        device = start_process_group(store, alone=True)
        # Ranks that read other files would compute losses of other clips.
        agree_on_clips(by_name(dataset.fingerprint, "--manifest"))
        evaluation = _evaluate(settings, cfg, sources, dataset, buckets, device)
        drain_process_group()
    return evaluation


def preflight(settings: Settings) -> tuple[TrainConfig, Sources, VideoTextDataset, list[Bucket]]:
    """The config, the weights, the clips and their buckets; the same on every rank.

    Raises:
        ValueError: for what does not fit.
    """
    _check_numbers(settings)
    find = partial(find_weights, allow_pickle=settings.allow_pickle)
    if find_adapters(settings.ckpt, ema=settings.use_ema) is None:
        find(settings.ckpt, ema=settings.use_ema)
    cfg = _with_sp_size(_config(settings), settings.sp_size)
    # A run's own setting is no permission to read its pickles.
    allowed = settings.allow_pickle or (settings.config is not None and cfg.allow_pickle)
    cfg = cfg.model_copy(update={"allow_pickle": allowed})
    check_launch(cfg, int(os.environ.get("WORLD_SIZE", "1")))
    sources = _sources(settings, cfg)
    weights = find(sources.weights, ema=sources.ema)
    # From here on, by the files of today: a run may save newer ones meanwhile.
    lora = resolved_sources(cfg, sources.lora, ema=settings.use_ema)
    sources = replace(sources, weights=str(weights), lora=lora)
    # Before encoders and the model are loaded, which takes minutes.
    if saved_config(weights) is not None:
        spec = cfg.model_spec
        check_model_config(weights, spec.model_class.__name__, spec.config, convert=cfg.convert)

    dataset = open_clips(cfg, settings.manifest)
    return cfg, sources, dataset, _buckets(cfg, dataset)


@dataclass(frozen=True)
class Sources:
    """The weights to evaluate, True if they are the EMA weights of a run, and merged adapters."""

    weights: str
    ema: bool
    lora: tuple[str, ...]


def _sources(settings: Settings, cfg: TrainConfig) -> Sources:
    """The settings' weights; of a run that trained adapters, the weights that it has loaded.

    Raises:
        ValueError: for adapters without the weights that they are for.
    """
    if find_adapters(settings.ckpt, ema=settings.use_ema) is None:
        return Sources(settings.ckpt, settings.use_ema, settings.lora)
    if cfg.load is None:
        raise ValueError(
            f"got checkpoint {settings.ckpt!r}, which holds LoRA adapters, and a config without "
            "load; expected the weights that they are for; pass --cfg-options load=PATH, or these "
            f"weights as CKPT and --lora {settings.ckpt}"
        )
    return Sources(cfg.load, False, (settings.ckpt, *settings.lora))


def compared_settings(settings: Settings, cfg: TrainConfig, sources: Sources) -> dict[str, Any]:
    """The settings that must be equal on all ranks, except the clips, by their names."""
    options = {
        "--bins": settings.bins,
        "--seeds": settings.seeds,
        "--no-ema": not settings.use_ema,
        "weights": found_at([sources.weights]),
        "--lora": found_at(sources.lora),
    }
    return cfg.model_dump(mode="json") | cost_model_of(cfg.cost_model).as_settings() | options


def _check_numbers(settings: Settings) -> None:
    for name, number in (("bins", settings.bins), ("seeds", settings.seeds)):
        if not 1 <= number <= 1000:
            raise ValueError(
                f"got --{name} {number}; expected 1 to 1,000; pass for example --{name} 3"
            )


def _config(settings: Settings) -> TrainConfig:
    """The training config of ``--config``, or else the one that the checkpoint keeps."""
    overrides = list(settings.overrides)
    if settings.config is not None:
        return load_train_config(settings.config, overrides, manifest=settings.manifest)

    checkpoint = newest_checkpoint(Path(settings.ckpt)) or Path(settings.ckpt)
    state = checkpoint / "state.json"
    values = read_json(state).get("config") if state.is_file() else None
    if values is None:
        raise ValueError(
            f"got checkpoint {settings.ckpt!r}, which does not state its autoencoder, text "
            "encoder, sizes and scheduler; expected the checkpoint of a run, or a training config "
            "in addition to the weights; pass --config CONFIG"
        )
    return saved_train_config(values, state, overrides)


def _with_sp_size(cfg: TrainConfig, sp_size: int | None) -> TrainConfig:
    if sp_size is None:
        # Degrees of buckets, or of each micro-batch, are training's.
        configured = cfg.sp_size if isinstance(cfg.sp_size, int) else 1
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        sp_size = configured if world_size % configured == 0 else 1
    return cfg.model_copy(update={"sp_size": sp_size})


def _buckets(cfg: TrainConfig, dataset: VideoTextDataset) -> list[Bucket]:
    """The clips of each bucket; without buckets all clips, in the config's shape.

    Raises:
        ValueError: if no clip has the size and length of any bucket.
    """
    if cfg.bucket_config is None:
        shape = cfg.clip_shape
        name = f"{shape.height}x{shape.width} x {shape.num_frames}"
        return [Bucket(name, cfg.batch_size, {shape: list(range(len(dataset)))})]

    config = _keeping_all(cfg.bucket_config)
    buckets = []
    for entry in Buckets.of(config).entries:
        # One bucket at a time: a clip counts in each bucket that it fits.
        alone = {entry.resolution: {entry.num_frames: (1.0, entry.batch_size)}}
        members = _plan(cfg, dataset, alone).epoch(0).members
        clips = {shape: ids.tolist() for shape, ids in members.items()}
        buckets.append(Bucket(entry.name, entry.batch_size or 1, clips))

    if not any(bucket.clips for bucket in buckets):
        table = "\n".join(_plan(cfg, dataset, config).describe())
        raise ValueError(
            f"got {len(dataset)} clips in --manifest {str(dataset.rows.file)!r}, none of which has "
            f"the size and length of a bucket:\n{table}\nexpected num_frames, height and width of "
            "at least one bucket; index the files again with opensora-sp index, add longer or "
            "larger clips, or pass --cfg-options bucket_config=..."
        )
    return buckets


def _keeping_all(config: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, Any]]:
    """A bucket config that keeps all clips that fit; one clip to a batch where a size is None."""
    changed: dict[str, dict[int, Any]] = {}
    for entry in Buckets.of(config).entries:
        keeps = (1.0, entry.batch_size or 1)
        changed.setdefault(entry.resolution, {})[entry.num_frames] = keeps
    return changed


def _plan(
    cfg: TrainConfig, dataset: VideoTextDataset, bucket_config: Mapping[str, Mapping[int, Any]]
) -> BucketPlan:
    """Which clips have the size and length of some buckets; there may be none."""
    return BucketPlan(
        dataset.rows,
        bucket_config,
        frame_interval=cfg.dataset.frame_interval,
        micro_batches_per_step=1,
        seed=cfg.seed,
        cost=lambda shape, number: 1.0,
        may_be_empty=True,
    )


def _evaluate(
    settings: Settings,
    cfg: TrainConfig,
    sources: Sources,
    dataset: VideoTextDataset,
    buckets: list[Bucket],
    device: torch.device,
) -> Evaluation:
    assert isinstance(cfg.sp_size, int)
    mesh, encoders = SequenceMesh(cfg.sp_size), make_encoders(cfg, device)
    weights = Path(sources.weights)
    adapters = opened_adapters(cfg, sources.lora, ema=settings.use_ema)
    with on_rank_0("checking the checkpoint") as is_rank_0:
        if is_rank_0:
            verify_parts(weights, adapters)
    vae, text_encoder = encoders.vae, encoders.text_encoder
    module = load_model(
        cfg, weights, mesh, device, vae, text_encoder, ema=sources.ema, adapters=adapters
    )
    # As in training, inputs are not cast: a timestep rounded to bf16 is another timestep.
    batch_maker, whole = BatchMaker(cfg, device), cfg.sequence_parallel.verify
    loss = HeldoutLoss(module, module, mesh, dataset, encoders, batch_maker, whole=whole)

    seeds = list(range(cfg.seed, cfg.seed + settings.seeds))
    losses = {bucket.name: _measure(loss, bucket, settings.bins, seeds) for bucket in buckets}
    measured = [bucket_loss for bucket_loss in losses.values() if bucket_loss is not None]
    empty = [name for name, bucket_loss in losses.items() if bucket_loss is None]
    # A table of nothing but empty buckets would pass as a result.
    if not measured:
        shapes = [bucket.name for bucket in buckets if bucket.clips]
        raise none_readable("--manifest", dataset, ", ".join(shapes), loss.corrupt.last)
    scaled = [f"{adapter.path}:{adapter.scale:g}" for adapter in adapters]
    evaluated = " + ".join([str(weights), *scaled])
    return Evaluation(evaluated, settings.manifest, seeds, measured, empty)


def _measure(loss: HeldoutLoss, bucket: Bucket, bins: int, seeds: list[int]) -> BucketLoss | None:
    """The loss of a bucket, the mean over the clips of all its shapes; None without clips."""
    total, clips = torch.zeros(len(seeds), bins, dtype=torch.float64), 0
    for shape, ids in bucket.clips.items():
        ids = ids[loss.mesh.dp_rank :: loss.mesh.dp_size]
        losses, measured = loss.measure(
            ids, shape, batch_size=bucket.batch_size, bins=bins, seeds=seeds
        )
        if measured:
            total += losses.double().cpu() * measured
            clips += measured
    if not clips:
        return None
    bucket_loss = BucketLoss.of(bucket.name, clips, total / clips)
    logger.info("%s: %d clips, loss %s", bucket.name, clips, bucket_loss.loss)
    return bucket_loss


# Results

# The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% confidence interval; None for one seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, by_seed: list[float]) -> Estimate:
        """Student's t interval of the mean of independent draws."""
        mean = statistics.fmean(by_seed)
        if len(by_seed) < 2:
            return cls(mean, None)
        # Beyond the table the last one is a little too wide.
        quantile = T_QUANTILES[min(len(by_seed) - 1, len(T_QUANTILES)) - 1]
        return cls(mean, quantile * statistics.stdev(by_seed) / math.sqrt(len(by_seed)))

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.4f}"
        return f"{self.mean:.4f}{interval}"


@dataclass(frozen=True)
class BucketLoss:
    """The loss of one bucket: of all timesteps, and of each bin from data to noise."""

    name: str
    clips: int
    loss: Estimate
    bins: list[Estimate]

    @classmethod
    def of(cls, name: str, clips: int, losses: Tensor) -> BucketLoss:
        """From the losses of each seed and bin, ``[S, K]``."""
        by_bin = [Estimate.of(column.tolist()) for column in losses.T]
        return cls(name, clips, Estimate.of(losses.mean(1).tolist()), by_bin)


@dataclass(frozen=True)
class Evaluation:
    """The losses of some weights.

    Attributes:
        weights: their path, with merged adapters and their scales.
        buckets: with a clip that could be read.
        empty: the names of the others.
    """

    weights: str
    manifest: str
    seeds: list[int]
    buckets: list[BucketLoss]
    empty: list[str]

    def table(self) -> str:
        """A line for each bucket and bin."""
        lines = [
            f"held-out loss of {self.weights} on {self.manifest}",
            f"seeds {self.seeds}; ± is the 95% confidence interval of the mean over seeds",
            "bins: equal parts of the timesteps as training draws them, from data (0%) to noise",
        ]

        for bucket in self.buckets:
            lines += ["", f"{bucket.name}: {bucket.clips} clips"]
            lines.append(f"  {'all timesteps':>20}  {bucket.loss}")
            for number, estimate in enumerate(bucket.bins):
                low, high = number / len(bucket.bins), (number + 1) / len(bucket.bins)
                lines.append(f"  {f'{low:.0%} to {high:.0%}':>20}  {estimate}")
        if self.empty:
            lines += ["", f"without clips: {', '.join(self.empty)}"]
        return "\n".join(lines)
