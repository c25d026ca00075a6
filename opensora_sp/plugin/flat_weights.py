"""Master weights in one buffer for each parameter group, and the model's weights gathered from it.

An optimizer step is then a few kernels for all parameters, not a few for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
        own = gathered = neighbours.to(self.whole[0].dtype)
        if world > 1:
            gathered = own.new_empty(world * own.numel())
            dist.all_gather_into_tensor(gathered, own)

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
