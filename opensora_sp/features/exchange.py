"""Distribution of clips to the ranks of a group that encode them, and their messages.

A clip falls into pieces that are encoded independently: frames, chunks, or the whole clip. The
pieces of all clips of a micro-batch, clip by clip, are distributed in contiguous, balanced runs. So
each rank reads and encodes 1/P of them.

Two messages follow, whose sizes every rank knows beforehand:

``agreed_rates``  on the host, before encoding: frame rates, and which clips could not be read.
``Payload``       one all-to-all on the device: the latents and captions that each other rank needs.

Legend: B clips, c latent channels, L text tokens, W their width, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.encoders.interface import Piece
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.communication import communicating, record
from opensora_sp.parallel.layout import ExchangePlan, balanced_range


class Portion(NamedTuple):
    """The frames of one clip that a rank reads, and the latent frames that it makes of them."""

    place: int  # of the clip in the micro-batch
    frames: slice
    latents: slice

    @property
    def has_caption(self) -> bool:
        """Whoever reads a clip's first frame encodes its caption."""
        return bool(self.frames.start == 0)


def distribute_pieces(
    places: Sequence[int], pieces: Sequence[Piece], num_ranks: int
) -> list[list[Portion]]:
    """For each rank its portions of the clips at ``places``; each clip falls into ``pieces``."""
    per_clip = len(pieces)
    portions: list[list[Portion]] = []
    for rank in range(num_ranks):
        # Contiguous runs: a rank seeks once in a file.
        start, stop = balanced_range(len(places) * per_clip, num_ranks, rank)
        rank_portions = []
        for number, place in enumerate(places):
            first = max(start - number * per_clip, 0)
            last = min(stop - number * per_clip, per_clip) - 1
            if first <= last:
                frames = slice(pieces[first].frames.start, pieces[last].frames.stop)
                latents = slice(pieces[first].latents.start, pieces[last].latents.stop)
                rank_portions.append(Portion(place, frames, latents))
        portions.append(rank_portions)
    return portions


class Assignment(NamedTuple):
    """Portions of a micro-batch's clips that each rank encodes, and that each rank needs."""

    portions: list[list[Portion]]  # of each rank
    delivery: ExchangePlan  # of latent positions, numbered over B, f, h, w
    needs_clip: list[list[bool]]  # [P][B]: whether a rank holds tokens of a clip

    def captions(self, sender: int, receiver: int) -> list[int]:
        """Places of the clips whose captions one rank encodes and the other needs."""
        needed = self.needs_clip[receiver]
        return [p.place for p in self.portions[sender] if p.has_caption and needed[p.place]]


def agreed_rates(rates: Mapping[int, float | None], mesh: SequenceMesh) -> dict[int, float | None]:
    """Frame rates of n clips by place, None where any rank could not read its portion. Collective.

    The message has two rows of float64: 1 for a corrupt clip, and the frame rate. Ranks take the
    maximum of both.

    Args:
        rates: from what this rank has read: None for a corrupt clip, 0 without a portion of it.
    """
    if mesh.sp_size == 1:
        return dict(rates)
    # On the host, so that no rank waits for its device.
    corrupt = [rate is None for rate in rates.values()]
    message = torch.tensor([corrupt, [rate or 0.0 for rate in rates.values()]], dtype=torch.float64)
    record("clips", backward=False, elements=message.numel(), element_size=8)
    with communicating("clips", message.device):
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=mesh.host_group)

    agreed = {}
    for place, is_corrupt, rate in zip(rates, *message.tolist(), strict=True):
        agreed[place] = None if is_corrupt else rate
    return agreed


class Payload(NamedTuple):
    """Message of one rank to another, float32.

    It has latents ``[n, c]`` and, of each clip whose caption is sent, the features ``[1, L, W]``
    of this caption and further arrays. Received ones are flat.
    """

    latents: Tensor
    captions: Sequence[Tensor]

    def pack(self) -> Tensor:
        """Join all in one flat buffer: the latents, then the captions."""
        return torch.cat([self.latents.flatten(), *(y.flatten() for y in self.captions)])
