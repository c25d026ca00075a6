"""Validation of a run while it trains: sampled videos, and the loss on held-out clips.

Both are computed by the ranks of a sequence-parallel group together, from the EMA or the current
weights: by the groups of training, or with ``sp_size="auto"`` by the largest ones that lie within a
node. All draws are keyed by the seed and their purpose, so training is the same
with and without validation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.checkpoint.paths import checkpoint_name
from opensora_sp.checkpoint.zero_shards import NamedShards
from opensora_sp.config import TrainConfig
from opensora_sp.data.dataset import VideoTextDataset
from opensora_sp.evaluation.heldout import HeldoutLoss, heldout_clips, none_readable
from opensora_sp.features.batch import BatchMaker
from opensora_sp.features.sources import Encoders
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import within_nodes
from opensora_sp.sampling.outputs import write_batch
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import batches_of, check_requests, requests_of

from .checkpointing import TrainingState
from .metrics import VIDEOS, Reporter
from .summary import sampling_config
from .trainable import ShardedEma


def preflight_validation(cfg: TrainConfig) -> None:
    """Check the prompts and the manifest of validation, before a model exists.

    Raises:
        ValueError: as ``sampling.run.preflight`` and ``VideoTextDataset`` do.
    """
    assert cfg.validation is not None
    sampling = sampling_config(cfg, cfg.validation)
    check_requests(sampling, requests_of(sampling))
    heldout_clips(cfg)


class Validator:
    """The validation of one run, whose config asks for it.

    Args:
        tensors: of the run, with its model and EMA weights.
        encoders: of videos and captions, also where training reads a feature cache.
        batch_maker: adds noise to held-out clips.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        mesh: SequenceMesh,
        model: Callable[..., Any],
        tensors: TrainingState,
        encoders: Encoders,
        batch_maker: BatchMaker,
    ) -> None:
        assert cfg.validation is not None
        self.cfg, self.mesh, self.tensors = cfg, mesh, tensors
        groups = within_nodes(mesh.family, mesh.ranks_per_node)
        self.group = next(group for group in groups if mesh.rank in group)
        self.replica, self.num_replicas = groups.index(self.group), len(groups)
        self.validation = cfg.validation
        self.heldout = heldout_clips(cfg)

        module, whole = tensors.module, cfg.sequence_parallel.verify
        sampling = sampling_config(cfg, self.validation)
        self.pipeline = Pipeline(
            sampling, module, encoders.vae, encoders.text_encoder, batch_maker.device
        )
        if self.heldout is not None:
            self.loss = HeldoutLoss(
                model, module, mesh, self.heldout, encoders, batch_maker, whole=whole
            )

    def validate(self, step: int, run_dir: Path, reporter: Reporter) -> float:
        """Write videos and report the held-out loss; returns the seconds it took. Collective."""
        since = time.perf_counter()
        folder = run_dir / VIDEOS / checkpoint_name(step)
        errors: list[str] = []
        with ExitStack() as contexts:
            # With "auto" the whole world would share each video, also over the network.
            contexts.enter_context(self.mesh.using(self.group))
            # Sampled videos show the weights that will be used, held-out losses are theirs.
            if self.validation.use_ema:
                contexts.enter_context(ema_weights(self.tensors.shards, self.tensors.ema))
            losses = self._validate(folder, errors)

        # All videos are written when errors are gathered.
        by_rank: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(by_rank, errors)
        if reporter.enabled:
            for error in chain.from_iterable(by_rank):
                reporter.outputs.report(f"{VIDEOS}/", error)
        reporter.validated(step, losses, folder)
        return time.perf_counter() - since

    @torch.no_grad()
    def _validate(self, folder: Path, errors: list[str]) -> list[float] | None:
        """Write the videos, and compute the losses of held-out clips.

        Args:
            errors: takes the errors of videos that this rank cannot write.
        """
        cfg = self.pipeline.cfg
        batches = batches_of(requests_of(cfg), cfg.batch_size, self.num_replicas)
        if batches:
            # Without a folder, each of its videos is an error.
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)

        for batch in batches[self.replica :: self.num_replicas]:
            parts = self.pipeline.looped(batch)
            write_batch(self.pipeline, batch, parts, self.mesh, folder, digest=None, errors=errors)
        return None if self.heldout is None else self._heldout_losses(self.heldout).tolist()

    def _heldout_losses(self, dataset: VideoTextDataset) -> Tensor:
        """The mean loss of the clips that all ranks can read, in each bin, ``[K]``. Collective."""
        assert dataset.shape is not None
        losses, num_clips = self.loss.measure(
            range(self.replica, len(dataset), self.num_replicas),
            dataset.shape,
            batch_size=self.validation.batch_size,
            bins=self.validation.bins,
            # The draws of each validation are the same, so its losses are comparable.
            seeds=[self.cfg.seed],
        )

        if not num_clips:
            raise none_readable(
                "validation.manifest", dataset, dataset.shape, self.loss.corrupt.last
            )
        return losses[0]


@contextmanager
def ema_weights(shards: NamedShards, ema: ShardedEma) -> Iterator[None]:
    """Inside, the model has the EMA weights; then the same bits as before. Collective.

    The working weights are kept on the CPU meanwhile.
    """
    with torch.no_grad():
        weights = {name: p.detach().to("cpu", copy=True) for name, p in shards.working.items()}
        for name, p in shards.working.items():
            p.copy_(shards.whole(name, ema.shards[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in shards.working.items():
                p.copy_(weights[name])
