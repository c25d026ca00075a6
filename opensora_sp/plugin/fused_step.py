"""An optimizer step in a few kernels for all parameters, not a few for each.

Adam runs torch's fused kernels, or is ColossalAI's HybridAdam. The master weights of a parameter
group are views of one buffer, from which the model's weights are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def hybrid_adam(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """HybridAdam in AdamW mode; its kernels are built at first use and need nvcc."""
    # ColossalAI takes seconds to import this module, and few runs need it.
    from colossalai.nn.optimizer import HybridAdam

    adam: torch.optim.Optimizer = HybridAdam(parameters, adamw_mode=True, **options)
    return adam


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's Adam and AdamW, unless their options ask for another way."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    return not any(g["foreach"] or g["differentiable"] or g["fused"] is False for g in groups)


@contextmanager
def fused(
    optimizer: torch.optim.Optimizer, divisor: Tensor | None, found_inf: Tensor | None
) -> Iterator[None]:
    """Inside, ``optimizer.step`` runs torch's fused kernels, by the protocol of its ``GradScaler``.

    Args:
        optimizer: one that ``can_fuse``.
        divisor: what gradients are divided by, float32 ``[]``.
        found_inf: 1.0 skips the step on the device, 0.0 takes it, float32 ``[]``.
    """
    adam: Any = optimizer
    # Restored after the step: checkpoints have the options as the user has set them.
    settings = [group["fused"] for group in adam.param_groups]
    _move_step_counts(adam)
    for group in adam.param_groups:
        group["fused"] = True
    adam.grad_scale, adam.found_inf = divisor, found_inf
    try:
        yield
    finally:
        # A later step without them would read this one's.
        del adam.grad_scale, adam.found_inf
        for group, setting in zip(adam.param_groups, settings, strict=True):
            group["fused"] = setting


def _move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move counts of steps to the device: torch's other kernels keep them on the CPU."""
    for weight, state in optimizer.state.items():
        # None: the parameter has had no gradient yet.
        count = state.get("step")
        if count is not None and getattr(count, "device", None) != weight.device:
            state["step"] = torch.as_tensor(count, dtype=torch.float32, device=weight.device)


def flattened(shards: list[Tensor]) -> list[Tensor]:
    """Copies of shards, ``[n]`` each, as views that follow each other in one buffer."""
    if not shards:
        return []
    return list(torch.cat(shards).split([shard.numel() for shard in shards]))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose shards are gathered by one collective.

    Attributes:
        shards: this rank's master weights, ``[n]`` each, which follow each other in one buffer.
        whole: the model's weights, in the precision of the training, ``[world * n]`` each.
    """

    shards: list[Tensor]
    whole: list[Tensor]

    def gather(self) -> None:
        """Set the whole weights on every rank to the master weights of all. Collective."""
        world, sizes = dist.get_world_size(), [shard.numel() for shard in self.shards]
        neighbours = self.shards[0].as_strided((sum(sizes),), (1,))
        # Cast before it is sent, which halves the bytes in 16 bits.
        local = gathered = neighbours.to(self.whole[0].dtype)
        if world > 1:
            gathered = local.new_empty(world * local.numel())
            dist.all_gather_into_tensor(gathered, local)

        # One kernel for all parameters, as in torch's FSDP2.
        rows = [whole.view(world, -1) for whole in self.whole]
        torch.split_with_sizes_copy(gathered.view(world, -1), sizes, dim=1, out=rows)


def in_buckets(pairs: Iterable[tuple[Tensor, Tensor]], max_elements: int) -> Iterator[Bucket]:
    """Buckets of at most ``max_elements`` elements of whole weights, or of one parameter.

    Args:
        pairs: shards that follow each other in one buffer, with the whole weights of each.
    """
    bucket, size = Bucket([], []), 0
    for shard, whole in pairs:
        if bucket.shards and size + whole.numel() > max_elements:
            yield bucket
            bucket, size = Bucket([], []), 0
        bucket.shards.append(shard)
        bucket.whole.append(whole)
        size += whole.numel()

    if bucket.shards:
        yield bucket
