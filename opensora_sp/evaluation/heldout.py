"""The loss of held-out clips in bins of timesteps, computed by all processes together.

All draws are keyed by the seed, the clip and the bin, and never by rank or batch. So the result
depends on the number of processes and the batch size by rounding alone.

Legend: B clips, S seeds, K bins of timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.config import TrainConfig
from opensora_sp.data.dataset import ClipShape, VideoTextDataset
from opensora_sp.data.sampler import MicroBatch
from opensora_sp.features.batch import BatchMaker, DrawConfig
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.sharded import Features, ShardedEncoder
from opensora_sp.features.sources import Source
from opensora_sp.parallel import SequenceMesh


def heldout_clips(cfg: TrainConfig) -> VideoTextDataset | None:
    """The clips of ``validation.manifest``, cut as clips of training; None without one."""
    if cfg.validation is None or cfg.validation.manifest is None:
        return None
    return open_clips(
        cfg,
        cfg.validation.manifest,
        num_frames=cfg.num_frames,
        image_size=cfg.size,
        cache=cfg.dataset.cache,
    )


def open_clips(cfg: TrainConfig, manifest: str, **cut: Any) -> VideoTextDataset:
    """Clips of a manifest, read as training reads its own.

    Args:
        cut: the shape and the cache of the clips, as ``VideoTextDataset`` takes them.
    """
    return VideoTextDataset(
        manifest,
        frame_interval=cfg.dataset.frame_interval,
        time_limit=cfg.dataset.time_limit,
        limits=cfg.limits,
        extra=cfg.extra_files,
        remove_caption_prefix=cfg.dataset.remove_caption_prefix,
        **cut,
    )


class HeldoutLoss:
    """Measures the loss of clips with the weights that a model has.

    Bin k holds the k-th part of the timesteps that training draws, from data to noise, so the mean
    of the bins is the loss that training would have on these clips.

    Args:
        model: called with noised latents, such as a boosted model.
        module: the model without ZeRO's wrapper, parallelized over ``mesh``.
        whole: give every rank all features, for a model that verifies its first batch.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        module: Any,
        mesh: SequenceMesh,
        dataset: VideoTextDataset,
        source: Source,
        batch_maker: BatchMaker,
        *,
        whole: bool = False,
    ) -> None:
        self.model, self.module, self.mesh = model, module, mesh
        self.dataset, self.batch_maker, self.device = dataset, batch_maker, batch_maker.device
        self.corrupt = CorruptSamples(dataset.rows, mesh, max_bad_fraction=1.0)
        self.encoder = ShardedEncoder(
            mesh, module, dataset, None, source, self.corrupt, self.device, whole=whole
        )

    @torch.no_grad()
    def measure(
        self,
        clips: Sequence[int],
        shape: ClipShape,
        *,
        batch_size: int,
        bins: int,
        seeds: Sequence[int],
    ) -> tuple[Tensor, int]:
        """The mean over the clips that all ranks can read, cut to ``shape``. Collective.

        Args:
            clips: of this rank's current group; each group measures others.

        Returns:
            The mean losses ``[S, K]``, NaN if there are no clips, and the number of clips.
        """
        # The losses of each seed and bin, and the number of clips.
        sums = torch.zeros(len(seeds) * bins + 1, device=self.device)
        for start in range(0, len(clips), batch_size):
            ids, features = self._readable(clips[start : start + batch_size], shape)
            if ids:
                sums[:-1] += self._losses(ids, features, bins, seeds).flatten()
                # Each rank of the group counts its part of a clip.
                sums[-1] += len(ids) / self.mesh.sp_size

        dist.all_reduce(sums)
        self.corrupt.report(self.device)
        means = (sums[:-1] / sums[-1]).view(len(seeds), bins)
        return means, round(sums[-1].item())

    def _readable(self, chosen: Sequence[int], shape: ClipShape) -> tuple[list[int], Features]:
        """The readable ones of some clips, and their features. Collective in the group."""
        ids = list(chosen)
        while True:
            features = self.encoder.filled(float("nan"), len(ids), shape)
            if not ids:
                return ids, features
            batch = MicroBatch(0, 0, shape, tuple(ids), 0.0)
            items = [self.dataset[sample] for sample in self.encoder.samples(batch)]
            # A rank knows of the clips that it reads, and the group has to agree.
            corrupt = self.encoder.encode_readable(features, ids, range(len(ids)), items)
            if not corrupt:
                return ids, features
            ids = [index for position, index in enumerate(ids) if position not in corrupt]

    def _losses(
        self, ids: list[int], features: Features, bins: int, seeds: Sequence[int]
    ) -> Tensor:
        """This rank's part of the sum of the clips' losses, ``[S, K]``."""
        # Captions are embedded once for all seeds and bins.
        text = self.module.encode_text(features.y, features.mask)
        sums = []
        for seed in seeds:
            rules = DrawConfig(
                seed=seed, channels=self.encoder.source.channels, purpose="validation_", bins=bins
            )
            draws = rules.draw([(i,) for i in ids], self.encoder.source.latent_size(features.shape))
            draws = to_device(draws, self.device)
            for k in range(bins):
                batch = self.batch_maker.make(features, draws, timestep=k)
                inputs = batch.inputs | dict(y=text, mask=None)
                shard = self.model(batch.x_t, **inputs, output="shards")
                sums.append(self.batch_maker.process.losses(shard, batch.noised).sum())
        return torch.stack(sums).view(len(seeds), bins)


def none_readable(name: str, dataset: VideoTextDataset, shapes: object, last: str) -> ValueError:
    """The error where no clip of a manifest could be cut to the shapes that were asked for.

    ``last``: path of the last one and the reason, as of ``CorruptSamples.last``.
    """
    example = f" ({last})" if last else ""
    return ValueError(
        f"got {len(dataset)} clips in {name} {str(dataset.rows.file)!r}, none of which can be cut "
        f"to {shapes}{example}; expected readable videos that are long enough; check the "
        "manifest's paths and their lengths"
    )
