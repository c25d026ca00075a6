"""The latents and text features of a micro-batch, computed once by a group of ranks.

1. Each rank reads its portions of the clips (``exchange.distribute_pieces``).
2. The ranks agree on the host which clips could be read, and on their frame rates.
3. Each rank encodes its portions of the clips that all could read, and captions of clips whose
   first frame it has.
4. One all-to-all sends every rank the latents of the rows in which its tokens enter and leave the
   model, and the captions of the clips that these belong to, with further arrays that the model
   takes (``ExtraFiles``).
5. If any rank could not read a clip, all ranks substitute the clip that the plan names for it, and
   repeat the steps from 1 on.

All sizes follow from the shapes. The number of tokens of each caption is known to all ranks
beforehand, from the manifest or from the index of a feature cache. So the host reads nothing back
from the device.

Legend: B clips, c latent channels, f x h x w latent size, L text tokens, W their width, P ranks of
the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from opensora_sp.common.tensors import to_device
from opensora_sp.data.dataset import ClipShape, CorruptSample, ExtraFiles, Sample
from opensora_sp.data.sampler import BatchPlan, MicroBatch, ReadRequest
from opensora_sp.parallel import SequenceMesh, held_rows
from opensora_sp.parallel.collectives import all_to_all
from opensora_sp.parallel.layout import plan_delivery
from opensora_sp.parallel.rank_groups import RankGroup

from .corrupt_samples import CorruptSamples
from .exchange import Assignment, Payload, Portion, agreed_rates, distribute_pieces
from .sources import Source

MAX_SUBSTITUTES = 20
DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class Features:
    """A micro-batch on one rank, in the shape of the whole one.

    Latents that this rank does not need are NaN, so that reading them by mistake is noticed.
    Captions that it does not need are zeros with an all-zero mask, which the model takes as one
    token.
    """

    shape: ClipShape
    latents_last: Tensor  # float32 [B, f, h, w, c or 2 * c], see ``Source.carried``
    y: Tensor  # float32 [B, 1, L, W]
    mask: Tensor  # int64 [B, L] on the CPU
    fps: Tensor  # float32 [B]
    text_lengths: list[int]  # tokens of each caption, also of captions that this rank does not need
    extra: dict[str, Tensor] = field(default_factory=dict)  # float32 [B, ...], see ``ExtraFiles``

    @classmethod
    def filled(
        cls,
        latent: float,
        num_clips: int,
        shape: ClipShape,
        source: Source,
        device: torch.device,
        extra: ExtraFiles | None = None,
    ) -> Features:
        """Latents of one value, empty captions, and zeros as ``extra`` arrays."""
        size = source.latent_size(shape)
        shapes = {} if extra is None else extra.shapes_of(shape)
        return cls(
            shape,
            torch.full((num_clips, *size, source.carried), latent, device=device),
            torch.zeros(num_clips, 1, source.max_length, source.width, device=device),
            torch.zeros(num_clips, source.max_length, dtype=torch.int64),
            torch.full((num_clips,), DEFAULT_FPS, device=device),
            [0] * num_clips,
            {name: torch.zeros(num_clips, *shapes[name], device=device) for name in shapes},
        )

    def with_caption(self, place: int) -> list[Tensor]:
        """Views of what comes with a clip's caption: its features, and the ``extra`` arrays."""
        return [self.y[place], *(tensor[place] for tensor in self.extra.values())]

    @property
    def latents(self) -> Tensor:
        """``[B, c or 2 * c, f, h, w]``"""
        return self.latents_last.movedim(-1, 1).contiguous()


class ShardedEncoder:
    """Encodes micro-batches to ``Features``, each rank of a group a part of the clips.

    Args:
        model: the parallelized model, whose token layout decides what each rank needs.
        dataset: indexed by ``Sample``; its items are what ``source`` encodes.
        plan: names substitutes of corrupt clips; not needed for ``encode_readable``.
        whole: give every rank all features of each group's first micro-batch, for a model that
            verifies it.

    Micro-batches belong to the mesh's current group, except for requests made ahead, which name
    theirs.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        model: Any,
        dataset: Any,
        plan: BatchPlan | None,
        source: Source,
        corrupt: CorruptSamples,
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        self.mesh, self.model, self.dataset, self.plan = mesh, model, dataset, plan
        self.source, self.corrupt, self.device = source, corrupt, device
        self._take_whole = {handle.ranks for handle in mesh.own} if whole else set()
        # Shapes of a training repeat, and numbering all positions takes longer than a launch.
        self._assignment = lru_cache(maxsize=16)(self._assign)

    def filled(self, latent: float, num_clips: int, shape: ClipShape) -> Features:
        """Features of clips whose latents have one value, see ``Features.filled``."""
        extra = self.dataset.extra
        return Features.filled(latent, num_clips, shape, self.source, self.device, extra)

    def samples(
        self,
        micro_batch: MicroBatch,
        places: Sequence[int] | None = None,
        group: RankGroup | None = None,
    ) -> list[Sample]:
        """The samples that this rank reads of the clips at ``places`` of a micro-batch.

        By default of all its clips. ``group`` shares the micro-batch, by default the mesh's current
        one.
        """
        if places is None:
            places = range(len(micro_batch.ids))
        group = group or self.mesh.group
        pieces = self.source.pieces(micro_batch.shape)
        portions = distribute_pieces(places, pieces, group.size)[self.mesh.rank - group.start]
        return [
            Sample(
                micro_batch.ids[portion.place],
                micro_batch.epoch,
                micro_batch.shape,
                (portion.frames.start, portion.frames.stop),
            )
            for portion in portions
        ]

    def request(self, micro_batch: MicroBatch, group: RankGroup | None = None) -> ReadRequest:
        """Request to a worker of this rank to read and draw for a micro-batch of a group."""
        size = self.source.latent_size(micro_batch.shape)
        return ReadRequest(micro_batch, self.samples(micro_batch, group=group), size, group)

    def encode(self, micro_batch: MicroBatch, items: Sequence[Any]) -> tuple[MicroBatch, Features]:
        """Encode what was read; returns the micro-batch with substitutes for corrupt clips.

        An idle round has the features of one empty clip. Collective in the group.

        Raises:
            ValueError: if no substitute of a corrupt clip can be read either.
        """
        shape = micro_batch.shape
        if not micro_batch.ids:
            # Zeros, not NaN: ZeRO reduces the gradients of an idle round as well.
            return micro_batch, self.filled(0.0, 1, shape)

        ids = list(micro_batch.ids)
        places = list(range(len(ids)))
        features = self.filled(float("nan"), len(ids), shape)

        # The group agrees on corrupt clips in each turn, so all ranks leave the loop together.
        for attempt in range(MAX_SUBSTITUTES + 1):
            places = self.encode_readable(features, ids, places, items)
            if not places:
                break
            assert self.plan is not None
            for place in places:
                ids[place] = self.plan.substitute(micro_batch, micro_batch.ids[place], attempt)
            if attempt == 0:
                # Counted once, however many tries a substitute takes.
                self.corrupt.count_substituted(places)
            used = micro_batch._replace(ids=tuple(ids))
            items = [self.dataset[sample] for sample in self.samples(used, places)]
        else:
            raise ValueError(
                f"got no readable clip in {MAX_SUBSTITUTES} tries for a batch of {shape}, the last "
                f"{self.corrupt.last}; expected video files; check the manifest's paths"
            )

        # Verification compares the first micro-batch of a group only.
        self._take_whole.discard(self.mesh.group)
        self.corrupt.count_used(ids)
        return micro_batch._replace(ids=tuple(ids)), features

    @torch.no_grad()
    def encode_readable(
        self, features: Features, ids: Sequence[int], places: Sequence[int], items: Sequence[Any]
    ) -> list[int]:
        """Fill in the features of the clips at ``places``, except of those that are corrupt.

        Each rank encodes its portions, from the items that it has read.

        Returns:
            The places of clips that some rank could not read, the same on all. Collective in the
            group.
        """
        assign = partial(
            self._assignment,
            self.mesh.group,
            features.shape,
            len(ids),
            tuple(places),
            self.mesh.group in self._take_whole,
        )
        portions = assign(()).portions[self.mesh.sp_rank]
        self.corrupt.note(items)

        rates_here: dict[int, float | None] = dict.fromkeys(places, 0.0)
        for portion, clip in zip(portions, items, strict=True):
            rates_here[portion.place] = None if isinstance(clip, CorruptSample) else clip.fps
        rates = agreed_rates(rates_here, self.mesh)
        corrupt = [place for place, rate in rates.items() if rate is None]
        for place, rate in rates.items():
            if rate is not None:
                features.fps[place].fill_(rate)

        # Known on the host, for the mask below and for captions that other ranks keep.
        clips = [ids[place] for place in places]
        captions = [self.dataset.rows[clip].text for clip in clips]
        for place, length in zip(places, self.source.text_lengths(clips, captions), strict=True):
            features.text_lengths[place] = length

        readable = []
        for portion, clip in zip(portions, items, strict=True):
            if portion.place not in corrupt:
                readable.append(clip)
        assignment = assign(tuple(corrupt))
        sent = self._encode(assignment, readable, features)
        self._fill(assignment, self._exchange(assignment, sent, features), features)
        return corrupt

    def _encode(
        self, assignment: Assignment, items: Sequence[Any], features: Features
    ) -> list[Payload]:
        """Encode this rank's portions; for each rank what it needs of them."""
        # A rank without portions takes part in the exchange.
        none = features.latents_last.new_zeros(0, self.source.carried)
        # Position by position, so that a delivery can select any of them.
        encoded = [z.movedim(0, -1).flatten(0, 2) for z in self.source.latents(items)]
        latents = torch.cat([none, *encoded])  # [n, c]
        captions = self._captions(assignment.portions[self.mesh.sp_rank], items, features)

        delivery = assignment.delivery
        packed = to_device(delivery.pack, self.device).split(delivery.send_splits)
        payloads = []
        for receiver, positions in enumerate(packed):
            places = assignment.captions(self.mesh.sp_rank, receiver)
            with_captions = list(chain.from_iterable(captions[place] for place in places))
            payloads.append(Payload(latents[positions], with_captions))
        return payloads

    def _captions(
        self, portions: Sequence[Portion], items: Sequence[Any], features: Features
    ) -> dict[int, list[Tensor]]:
        """Features of the captions that this rank encodes, ``[1, L, W]``, and arrays, by place."""
        with_caption = {}
        for portion, clip in zip(portions, items, strict=True):
            if portion.has_caption:
                with_caption[portion.place] = clip

        captions = {}
        encoded = self.source.text_features(list(with_caption.values()))
        for place, text in zip(with_caption, encoded, strict=True):
            count = features.text_lengths[place]
            # Other ranks have taken the size of what they receive from this number.
            if len(text) != count:
                raise ValueError(
                    f"got features of {len(text)} tokens for the caption "
                    f"{with_caption[place].text[:80]!r}, of which num_tokens counts {count} (at "
                    "most max_length); expected the same number; correct encode or num_tokens of "
                    "the class that text_encoder.type names"
                )
            captions[place] = [pad(text, (0, 0, 0, self.source.max_length - len(text)))[None]]
            for name in features.extra:
                captions[place].append(to_device(with_caption[place].extra[name], self.device))
        return captions

    def _exchange(
        self, assignment: Assignment, sent: list[Payload], features: Features
    ) -> list[Payload]:
        """Send each rank its payload; returns the payloads received, rank by rank."""
        if self.mesh.sp_size == 1:
            return sent
        channels = self.source.carried
        lengths = [tensor.numel() for tensor in features.with_caption(0)]
        sections = []  # of each payload received: elements of the latents, and of each tensor
        for sender, num_positions in enumerate(assignment.delivery.recv_splits):
            num_captions = len(assignment.captions(sender, self.mesh.sp_rank))
            sections.append([num_positions * channels, *lengths * num_captions])

        # Latents and captions in one exchange: each has a latency.
        buffers = [payload.pack() for payload in sent]
        recv = list(map(sum, sections))
        assert self.mesh.sp_group is not None
        received, _ = all_to_all(
            torch.cat(buffers),
            [buffer.numel() for buffer in buffers],
            recv,
            self.mesh.sp_group,
            kind="data",
            backward=False,
        )

        payloads = []
        for buffer, lengths_of_payload in zip(received.split(recv), sections, strict=True):
            latents, *captions = buffer.split(lengths_of_payload)
            payloads.append(Payload(latents.view(-1, channels), captions))
        return payloads

    def _fill(self, assignment: Assignment, received: list[Payload], features: Features) -> None:
        """Write received payloads into ``features``."""
        latents = features.latents_last.flatten(0, 3)  # a view, [B * f * h * w, c]
        numbers = to_device(assignment.delivery.unpack, self.device)
        # Each position is received once, so the order of senders does not matter.
        latents[numbers] = torch.cat([payload.latents for payload in received])

        for sender, payload in enumerate(received):
            places, received_with = assignment.captions(sender, self.mesh.sp_rank), payload.captions
            targets = chain.from_iterable(map(features.with_caption, places))
            for target, tensor in zip(targets, received_with, strict=True):
                target.copy_(tensor.view_as(target))
            for place in places:
                features.mask[place, : features.text_lengths[place]] = 1

    def _assign(
        self,
        group: RankGroup,
        shape: ClipShape,
        num_clips: int,
        places: tuple[int, ...],
        whole: bool,
        corrupt: tuple[int, ...],
    ) -> Assignment:
        """The portions of the clips at ``places``, except of ``corrupt`` clips.

        ``group`` is the current one.
        """
        size, ranks = self.source.latent_size(shape), group.size
        portions = []
        for rank_portions in distribute_pieces(places, self.source.pieces(shape), ranks):
            portions.append([portion for portion in rank_portions if portion.place not in corrupt])

        # Positions are numbered once, and rows select numbers.
        numbers = torch.arange(num_clips * size[0] * size[1] * size[2]).view(num_clips, *size)
        made = []
        for rank_portions in portions:
            parts = [numbers[portion.place, portion.latents].flatten() for portion in rank_portions]
            made.append(torch.cat([numbers.new_zeros(0), *parts]))

        needed = [torch.ones(numbers.numel(), dtype=torch.bool) for _ in range(ranks)]
        if ranks > 1 and not whole:
            grid = self.model.config.grid(num_clips, size)
            needed = [_positions(rows, numbers) for rows in held_rows(self.model, grid)]

        needs_clip = [positions.view(num_clips, -1).any(1).tolist() for positions in needed]
        return Assignment(portions, plan_delivery(made, needed, self.mesh.sp_rank), needs_clip)


def _positions(rows_held: Sequence[Any], numbers: Tensor) -> Tensor:
    """Mask of the latent positions ``[B, f, h, w]`` that lie in ``rows_held``, flattened."""
    mask = torch.zeros(numbers.numel() + 1, dtype=torch.bool)
    for rows in rows_held:
        # Patches are padded with 0, so positions are numbered from 1 here.
        mask[rows.slice(numbers + 1).flatten()] = True
    return mask[1:]
