"""Training losses, on whole outputs or on the rows that one rank holds.

Under sequence parallelism a rank sums over its own positions and divides by the count of the whole
sample, so that the losses of all ranks add up to the sample's mean. Not counted are padding up to
whole patches, positions outside a clip that is smaller than its batch, and conditioning frames.

Legend: B samples, c latent channels, F x h x w latent size, R local rows, L tokens of a row, V
patch volume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device

LossWeight: TypeAlias = Literal["sample", "micro_batch"]


@dataclass(frozen=True)
class Positions:
    """The latent positions on this rank, as N units of one sample each, channels last.

    For a whole output the units are the samples, ``* = F, h, w``. For a shard they are its rows,
    ``* = L, V``. Elementwise terms of a loss are the same code for both.

    Attributes:
        predicted: ``[N, *, C_out]``; 0 where not counted, so that no term overflows there.
        tensors: the same positions of other tensors, ``[N, *, c]`` each.
        sample: index of each unit's sample, int64 ``[N]``.
        counted: bool ``[N, *]``; None if all count.
        count: number of counted values of each whole sample, over all ranks, ``[B]``.
    """

    predicted: Tensor
    tensors: list[Tensor]
    sample: Tensor
    counted: Tensor | None
    count: Tensor

    @classmethod
    def of(
        cls,
        prediction: Tensor | Any,
        *tensors: Tensor,
        x_mask: Tensor | None = None,
        video_mask: Tensor | None = None,
    ) -> Positions:
        """Select the positions of a model's output from tensors of the whole batch.

        Args:
            prediction: ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank holds.
            tensors: ``[B, c, F, h, w]`` each, whole in either case.
            x_mask: bool ``[B, F]``; frames where it is False do not count.
            video_mask: bool ``[B, F, h, w]``, the input of the model; positions where it is False
                do not count. A shard has its own.
        """
        num_samples, channels, *size = tensors[0].shape
        if not isinstance(prediction, Tensor) and prediction.rows.grid.mask is not None:
            video_mask = prediction.rows.grid.mask.positions

        mask = _combined(x_mask, video_mask)
        # Masks may lie on the CPU, as the model's do.
        mask = None if mask is None else to_device(mask, tensors[0].device)
        if mask is None:
            count = torch.full((num_samples,), math.prod(size), device=tensors[0].device)
        else:
            count = mask.flatten(1).sum(1) * (math.prod(size) // mask[0].numel())

        select = _of_output if isinstance(prediction, Tensor) else _of_shard
        local = select(prediction, tensors, mask, count * channels)
        if local.counted is None:
            return local
        return replace(local, predicted=local.predicted.masked_fill(~local.counted[..., None], 0))

    def means(self, values: Tensor) -> Tensor:
        """Elementwise values ``[N, *, c]`` -> this rank's part of each sample's mean, ``[B]``.

        A sample without counted positions gives 0.
        """
        sums = values.sum(-1)  # [N, *]
        if self.counted is not None:
            sums = sums * self.counted
        # Rows of a shard belong to several samples.
        totals = values.new_zeros(len(self.count)).index_add(0, self.sample, sums.flatten(1).sum(1))
        return totals / self.count.clamp(min=1)


def _combined(x_mask: Tensor | None, video_mask: Tensor | None) -> Tensor | None:
    """Counted positions, bool ``[B, F]`` or ``[B, F, h, w]``; None if all count."""
    if video_mask is None:
        return None if x_mask is None else x_mask.bool()
    inside = video_mask.bool()
    return inside if x_mask is None else inside & x_mask.to(inside.device).bool()[:, :, None, None]


def _of_output(
    output: Tensor, tensors: tuple[Tensor, ...], mask: Tensor | None, count: Tensor
) -> Positions:
    predicted, *local = (z.movedim(1, -1) for z in (output, *tensors))  # [B, F, h, w, channels]
    sample = torch.arange(len(output), device=output.device)
    if mask is not None:
        mask = mask if mask.ndim == 4 else mask[:, :, None, None]
        mask = mask.expand(predicted.shape[:-1])
    return Positions(predicted, local, sample, mask, count)


def _of_shard(
    shard: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, count: Tensor
) -> Positions:
    rows, volume = shard.rows, shard.rows.grid.patch_volume
    predicted = shard.tensor.unflatten(-1, (volume, -1))  # [R, L, V, C_out]

    # [R, L, V, c]; with no rows, -1 could not be inferred.
    local = [rows.slice(z).unflatten(-1, (volume, z.shape[1])) for z in tensors]

    # [R, L, V], False in padding.
    counted = rows.inside(count.device) if mask is None else rows.slice(mask)
    return Positions(predicted, local, rows.samples(count.device), counted, count)


def velocity_loss(
    prediction: Tensor | Any,
    target: Tensor,
    x_mask: Tensor | None = None,
    video_mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Squared error of each sample: this rank's sum, divided by the count of the whole sample.

    Args:
        prediction: a model's output ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank
            holds. Channels beyond the target's are ignored.
        target: ``[B, c, F, h, w]``, whole in either case.
        x_mask: bool ``[B, F]``; frames where it is False do not count.
        video_mask: bool ``[B, F, h, w]``, the input of the model. Clips of different sizes have the
            same weight.
        weights: of each frame, ``[F]``; None is 1 for all. See ``frame_weights``.

    Returns:
        ``[B]``: each sample's mean for a whole output. For shards, a part of it; the parts of all
        ranks add up to the mean. A sample without counted frames gives 0.
    """
    tensors = [target]
    if weights is not None:
        tensors.append(weights[None, None, :, None, None].expand(len(target), 1, *target.shape[2:]))
    local = Positions.of(prediction, *tensors, x_mask=x_mask, video_mask=video_mask)

    errors = (local.predicted[..., : target.shape[1]] - local.tensors[0]).square()
    return local.means(errors if weights is None else errors * local.tensors[1])


def frame_weights(num_frames: int, conditioning_frames: Sequence[int], weight: float) -> Tensor:
    """Weights of frames ``[F]``: ``weight`` for ``conditioning_frames``, and a mean of 1 over all.

    If these are all frames, each has ``weight``, which is then the mean (Open-Sora 1.3).

    Args:
        weight: 0 to 1; more would leave less than nothing to the other frames.
    """
    # A frame may be named twice.
    index = sorted(set(conditioning_frames))
    others = num_frames - len(index)
    rest = (num_frames - len(index) * weight) / others if others else 1.0
    weights = torch.full((num_frames,), rest)
    weights[index] = weight
    return weights


def samples_of_mean(weight: LossWeight, *, micro_batch: int, sizes: Sequence[int]) -> int:
    """Divisor of a sample's loss in the mean of an optimizer step.

    That is ``global_samples`` of ``rank_loss``.

    Args:
        weight: "sample" is the mean over all samples of the step; "micro_batch" the mean over its
            micro-batches of the mean over their samples, as if each were a step.
        micro_batch: samples of the sample's own micro-batch; 0 where a rank runs one of zeros.
        sizes: samples of all micro-batches of the step.
    """
    if weight == "sample" or micro_batch == 0:
        return sum(sizes)
    return len(sizes) * micro_batch


def rank_loss(sample_losses: Tensor, *, global_samples: int, world_size: int) -> Tensor:
    """The scalar loss of one rank, scaled so that gradients are averaged over the world.

    The average of the ranks' gradients is then the gradient of the mean over all samples.

    Args:
        sample_losses: ``[B]`` from ``velocity_loss`` or ``losses`` of a process; of shards under
            sequence parallelism.
        global_samples: samples in the whole optimizer step, over all replicas and micro-batches;
            for other means see ``samples_of_mean``.
        world_size: ranks whose gradients are averaged, dp x sp.
    """
    return sample_losses.sum() * (world_size / global_samples)
