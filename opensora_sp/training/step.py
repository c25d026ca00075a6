"""One optimizer step of a training run, and its result, which the host reads one step late.

A step's loss, and whether its update was taken, are numbers on the device. A host that waited for
them could not queue the next step meanwhile, and the device would idle. So they are copied
asynchronously, and read when the next step is queued. A checkpoint or a line of the log needs exact
numbers, so the last step is settled before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from opensora_sp.common.tensors import ToHost
from opensora_sp.config import TrainConfig
from opensora_sp.data.loader import LoadedBatch, StepBatches
from opensora_sp.diffusion import rank_loss
from opensora_sp.diffusion.loss import samples_of_mean
from opensora_sp.features.batch import Batch, BatchMaker, DrawConfig
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.runtime.watchdog import Watchdog

from .checkpointing import TrainingState
from .memory_fit import ActivationBudget
from .sync_check import SyncCheck
from .trainable import DropoutDraws, learning_rate


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, equal on all ranks."""

    step: int  # counted from 1
    loss: float  # mean over the step's samples
    taken: bool  # False: loss or gradient were not finite, and no weight has changed
    stop: bool  # some rank was asked to stop


class PendingResult:
    """The result of a step that may still be computed.

    Args:
        step: counted from 1.
        loss: mean over the step's samples, a scalar.
        taken: whether the weights were updated, a bool scalar.
        stop: a scalar, above 0 where some rank was asked to stop.
    """

    def __init__(self, step: int, *, loss: Tensor, taken: Tensor, stop: Tensor) -> None:
        self.step = step
        # One copy for all three, since each is an operation that the host queues.
        self._numbers = ToHost(torch.stack([loss, taken.to(loss), stop]))

    def read(self) -> StepResult:
        """Wait until the step is computed."""
        loss, taken, stop = self._numbers.tolist()
        return StepResult(self.step, loss, taken=taken > 0, stop=stop > 0)


class DelayedResults:
    """Reads the result of a step when the next one is queued, or when it is needed.

    Args:
        observe: called with the result of each step, in their order.

    Attributes:
        asked_to_stop: whether some rank was asked to stop, as far as results are read.
    """

    def __init__(self, observe: Callable[[StepResult], None]) -> None:
        self.asked_to_stop = False
        self._observe = observe
        self._pending: PendingResult | None = None

    def add(self, pending: PendingResult) -> None:
        """Read the step before, while the device computes the one that is queued now."""
        self.settle()
        self._pending = pending

    def settle(self) -> None:
        """Wait for the newest step, unless it is read already."""
        if self._pending is not None:
            result, self._pending = self._pending.read(), None
            self.asked_to_stop |= result.stop
            self._observe(result)


@dataclass
class TrainingStep:
    """One optimizer step: forward and backward of each micro-batch, then the update.

    Args:
        count_work: gets each micro-batch that is computed, for the metrics.
    """

    cfg: TrainConfig
    booster: Any
    model: Callable[..., Any]
    optimizer: Any
    tensors: TrainingState
    encoder: ShardedEncoder
    draw_config: DrawConfig
    batch_maker: BatchMaker
    activations: ActivationBudget
    count_work: Callable[[Batch], None]
    sync_check: SyncCheck
    dropout: DropoutDraws

    def run(self, step: int, batches: StepBatches, watch: Watchdog | None = None) -> PendingResult:
        """Queue step number ``step``, counted from 0. Collective.

        Args:
            watch: its ranks may be asked to stop, which every rank learns from the result.
        """
        mesh = self.encoder.mesh
        # Losses are weighted by the samples of the whole step, on all ranks.
        sizes = [len(micro_batch.ids) for micro_batch in batches.micro_batches]
        loss = torch.zeros((), device=self.batch_maker.device)
        for loaded in batches.loaded:
            group = loaded.group or mesh.group
            with mesh.using(group), self.dropout.dropped(loaded.micro_batch.number):
                loss += self._forward_backward(step, loaded, sizes)
        return self._update(step, loss, watch)

    def _forward_backward(self, step: int, loaded: LoadedBatch, sizes: Sequence[int]) -> Tensor:
        """Run a micro-batch; returns this rank's part of the step's mean loss, ``[]``.

        Args:
            sizes: samples of all micro-batches of the step.
        """
        batch = self._batch(loaded)
        num_samples = samples_of_mean(
            self.cfg.loss_weight, micro_batch=len(loaded.micro_batch.ids), sizes=sizes
        )
        is_idle = not loaded.micro_batch.ids
        if not is_idle:
            self.sync_check.see(step, batch.of_group)
            self.count_work(batch)

        # Blocks read their levels of recomputation when the forward pass begins.
        self.activations.set_levels_for(batch.x_t.shape)
        # ``output`` is an argument of the parallelized model (``SequenceParallel.forward``).
        shard = self.model(batch.x_t, **batch.inputs, output="shards")
        with record_function("loss"):
            losses = self.batch_maker.process.losses(shard, batch.noised)
            if is_idle:
                # ZeRO reduces gradients in the order in which a backward pass yields them, so idle
                # replicas run one.
                losses = losses * 0.0
            world_size = dist.get_world_size()
            loss = rank_loss(losses, global_samples=num_samples, world_size=world_size)
        with record_function("backward"):
            self.booster.backward(loss, self.optimizer)
        # The loss that is logged is a sum over all ranks, without the factor for ZeRO's mean.
        return losses.detach().sum() / num_samples

    def _batch(self, loaded: LoadedBatch) -> Batch:
        """Encode the clips, which may substitute corrupt ones, and add noise."""
        with record_function("encode"):
            used, features = self.encoder.encode(loaded.micro_batch, loaded.items)
            draws = loaded.draws
            if used != loaded.micro_batch:
                # The worker did not know the clips that substitute corrupt ones.
                latent_size = self.encoder.source.latent_size(used.shape)
                draws = self.draw_config.draw_micro_batch(used, latent_size)
            return self.batch_maker.make(features, draws)

    def _update(self, step: int, loss: Tensor, watch: Watchdog | None) -> PendingResult:
        """Queue the update of the weights, which the device skips unless all numbers are finite.

        A skipped step still consumes its batches and its learning rate.

        Args:
            loss: this rank's part of the step's mean loss, ``[]``.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.cfg, step)

        # One collective for the loss and for whether to stop.
        asked_to_stop = watch is not None and watch.stop_reason is not None
        sums = torch.stack([loss, torch.full_like(loss, asked_to_stop)])
        dist.all_reduce(sums)
        # Before the update, which replaces all copies of weights and so hides a difference.
        self.sync_check.compare(step)

        total, stop = sums.unbind()
        with record_function("optimizer"):
            taken = self.optimizer.step_if_finite(total)
        self.tensors.ema.update(step, taken)
        return PendingResult(step + 1, loss=total, taken=taken, stop=stop)
