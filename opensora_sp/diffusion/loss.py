"""The training loss, on whole outputs or on the rows that one rank holds.

Legend: B samples, c latent channels, R rows held, T frames of patches, V patch volume.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def velocity_loss(prediction: Tensor | Any, target: Tensor, x_mask: Tensor | None = None) -> Tensor:
    """Squared error of each sample: the sum over what is held here, over the count of the whole sample.

    Args:
        prediction: a model's output ``[B, C_out, frames, height, width]``, or the ``Shard`` of it that this rank holds.
            Channels beyond those of the target are ignored.
        target: ``[B, c, frames, height, width]``, whole in either case.
        x_mask: bool ``[B, frames]``; frames where it is False do not count.

    Returns:
        ``[B]``: for a whole output each sample's mean; for shards a part of it, which sums to the mean over the
        ranks. A sample without a frame that counts gives 0.
    """
    num_samples, channels, frames, height, width = target.shape
    x_mask = None if x_mask is None else x_mask.bool()
    counted = torch.full((num_samples,), frames, device=target.device) if x_mask is None else x_mask.sum(1)
    whole = counted * height * width * channels  # [B]
    sums = _whole_sums if isinstance(prediction, Tensor) else _shard_sums
    return sums(prediction, target, x_mask) / whole.clamp(min=1)


def _whole_sums(output: Tensor, target: Tensor, x_mask: Tensor | None) -> Tensor:
    error = (output[:, : target.shape[1]] - target).square().sum(dim=(1, 3, 4))  # [B, frames]
    return (error if x_mask is None else error * x_mask).sum(1)


def _shard_sums(shard: Any, target: Tensor, x_mask: Tensor | None) -> Tensor:
    layout, channels = shard.layout, target.shape[1]
    volume = layout.grid.patch_volume
    predicted = shard.tensor.unflatten(-1, (volume, -1))[..., :channels]  # [R, T, V, c]
    wanted = layout.slice(target).unflatten(-1, (volume, channels))
    counted = layout.inside(target.device)  # [R, T, V]
    if x_mask is not None:
        counted = counted & layout.slice(x_mask)
    error = (predicted - wanted).square().sum(-1) * counted
    sums = error.new_zeros(len(target))
    return sums.index_add(0, layout.samples(target.device), error.sum(dim=(1, 2)))


def rank_loss(sample_losses: Tensor, *, global_samples: int, world_size: int) -> Tensor:
    """What one rank calls ``backward`` on, so that the mean gradient over the world is that of the global mean.

    Args:
        sample_losses: ``[B]`` from ``velocity_loss``; of shards under sequence parallelism.
        global_samples: samples in the whole optimizer step, over all replicas and micro-batches.
        world_size: ranks whose gradients are averaged, dp x sp.
    """
    return sample_losses.sum() * (world_size / global_samples)
