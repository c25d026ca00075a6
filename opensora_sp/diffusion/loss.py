"""The training losses, on whole outputs or on the rows that one rank holds.

The rule of sequence parallelism: a rank sums over the positions that it holds and divides by the
count of the whole sample, so the parts of all ranks add up to the sample's mean. Positions that pad
the latent up to whole patches, those outside of a clip that is smaller than its batch, and frames
that are given, count nowhere.

Legend: B samples, c latent channels, F x h x w latent size, R rows held, L tokens of a row, V patch
volume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """The latent positions held here, as N units of equal size that each belong to one sample,
    channels last.

    For a whole output the units are the samples, ``* = F, h, w``; for a shard its rows, ``* = L,
    V``. An elementwise term of a loss reads the same for both.
    """

    predicted: Tensor  # [N, *, C_out]; zero where nothing counts, so that no term overflows there
    wholes: tuple[Tensor, ...]  # [N, *, c] each
    sample: Tensor  # int64 [N]
    counted: Tensor | None  # bool [N, *]; None where all count
    count: Tensor  # [B] values that count in a whole sample, wherever they are held

    @classmethod
    def of(
        cls,
        prediction: Tensor | Any,
        *wholes: Tensor,
        x_mask: Tensor | None = None,
        video_mask: Tensor | None = None,
    ) -> Positions:
        """Cut the positions of a model's output out of whole tensors.

        Args:
            prediction: ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank holds.
            wholes: ``[B, c, F, h, w]`` each, whole in either case.
            x_mask: bool ``[B, F]``; frames where it is False do not count.
            video_mask: bool ``[B, F, h, w]`` as the model was given it; positions where it is False
                do not count. A shard knows its own.
        """
        num_samples, channels, *size = wholes[0].shape
        if not isinstance(prediction, Tensor) and prediction.layout.grid.mask is not None:
            video_mask = prediction.layout.grid.mask.positions
        counting = _counting(x_mask, video_mask)
        cut = _cut_whole if isinstance(prediction, Tensor) else _cut_shard
        predicted, cuts, sample, counted = cut(prediction, wholes, counting)
        if counted is not None:
            predicted = predicted.masked_fill(~counted[..., None], 0)
        if counting is None:
            count = torch.full((num_samples,), math.prod(size), device=wholes[0].device)
        else:
            count = counting.flatten(1).sum(1) * (math.prod(size) // counting[0].numel())
        return cls(predicted, cuts, sample, counted, count * channels)

    def means(self, values: Tensor) -> Tensor:
        """Elementwise values ``[N, *, c]`` -> ``[B]``: what is held of each sample's mean, 0 for
        one that counts nowhere.
        """
        sums = values.sum(-1)  # [N, *]
        if self.counted is not None:
            sums = sums * self.counted
        totals = values.new_zeros(len(self.count)).index_add(0, self.sample, sums.flatten(1).sum(1))
        return totals / self.count.clamp(min=1)


_Cuts = tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor | None]


def _counting(x_mask: Tensor | None, video_mask: Tensor | None) -> Tensor | None:
    """What counts, bool ``[B, F]`` or ``[B, F, h, w]``; None where all does."""
    if x_mask is None or video_mask is None:
        found = video_mask if x_mask is None else x_mask
        return None if found is None else found.bool()
    return video_mask & x_mask.bool()[:, :, None, None]


def _cut_whole(output: Tensor, wholes: tuple[Tensor, ...], counting: Tensor | None) -> _Cuts:
    predicted, *cuts = (z.movedim(1, -1) for z in (output, *wholes))  # [B, F, h, w, channels]
    sample = torch.arange(len(output), device=output.device)
    counted = (
        None if counting is None else counting.view(*counting.shape, *[1] * (4 - counting.ndim))
    )
    counted = None if counted is None else counted.expand(predicted.shape[:-1])
    return predicted, tuple(cuts), sample, counted


def _cut_shard(shard: Any, wholes: tuple[Tensor, ...], counting: Tensor | None) -> _Cuts:
    layout, device = shard.layout, wholes[0].device
    of_patch = (layout.grid.patch_volume, -1)
    predicted = shard.tensor.unflatten(-1, of_patch)  # [R, L, V, C_out]
    cuts = tuple(
        layout.slice(z).unflatten(-1, (of_patch[0], z.shape[1])) for z in wholes
    )  # [R, L, V, c]
    counted = (
        layout.inside(device) if counting is None else layout.slice(counting)
    )  # [R, L, V]; False in padding
    return predicted, cuts, layout.samples(device), counted


def velocity_loss(
    prediction: Tensor | Any,
    target: Tensor,
    x_mask: Tensor | None = None,
    video_mask: Tensor | None = None,
) -> Tensor:
    """Squared error of each sample: the sum over what is held here, over the count of the whole
    sample.

    Args:
        prediction: a model's output ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank
            holds. Channels beyond those of the target are ignored.
        target: ``[B, c, F, h, w]``, whole in either case.
        x_mask: bool ``[B, F]``; frames where it is False do not count.
        video_mask: bool ``[B, F, h, w]``, as the model was given it: clips of different sizes weigh
            alike, whatever their batch has around them.

    Returns:
        ``[B]``: for a whole output each sample's mean; for shards a part of it, which sums to the
        mean over the ranks. A sample without a frame that counts gives 0.
    """
    here = Positions.of(prediction, target, x_mask=x_mask, video_mask=video_mask)
    return here.means((here.predicted[..., : target.shape[1]] - here.wholes[0]).square())


def rank_loss(sample_losses: Tensor, *, global_samples: int, world_size: int) -> Tensor:
    """What one rank calls ``backward`` on, so that the mean gradient over the world is that of the
    global mean.

    Args:
        sample_losses: ``[B]`` from ``velocity_loss`` or ``losses`` of a process; of shards under
            sequence parallelism.
        global_samples: samples in the whole optimizer step, over all replicas and micro-batches.
        world_size: ranks whose gradients are averaged, dp x sp.
    """
    return sample_losses.sum() * (world_size / global_samples)
