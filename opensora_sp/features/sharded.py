"""What the model is trained on, latents of clips and features of captions, made once by the ranks of an SP group.

The clips of a micro-batch fall into pieces that are encoded without the rest (``encoders.independent_pieces``: frames,
chunks, or whole clips). All pieces, clip by clip, are dealt out in balanced runs, so each rank reads, decodes and
encodes 1/P of them; who has a clip's first piece encodes its caption. The ranks agree on the host which clips could be
read, and on their frame rates. Then one all-to-all hands every rank the latents of the rows in which its tokens enter
and leave the model, and the captions of the clips that these belong to. All sizes follow from the shapes. A clip that
any rank could not read is replaced on all of them, by the one that the plan names for it, in another exchange of the
same kind. How many tokens each caption has is known to all ranks beforehand: it follows from the manifest, or stands in
the index of a feature cache. So the host reads nothing back from the device.

Legend: B clips, c latent channels, f x h x w latent size, L text tokens, W their width, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from opensora_sp.data import BatchPlan, BrokenClip, Clip, ClipShape, MicroBatch, Sample, scale
from opensora_sp.encoders import Piece, independent_pieces
from opensora_sp.parallel import SequenceMesh, held_rows
from opensora_sp.parallel.collectives import all_to_all
from opensora_sp.parallel.debug.comm_counter import record
from opensora_sp.parallel.debug.comm_timing import communicating
from opensora_sp.parallel.layout import ExchangePlan, balanced_run, plan_delivery
from opensora_sp.transfer import to_device

from .corrupt_samples import BrokenClips

MAX_REPLACEMENTS = 20


class Source(Protocol):
    """Makes latents and text features of what a dataset reads: encoders at work, or a cache of what they made."""

    channels: int
    width: int
    max_length: int

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        """f, h, w."""

    def pieces(self, shape: ClipShape) -> list[Piece]:
        """Parts that are made by themselves: the frames of an item, and the latent frames that they become."""

    def latents(self, items: Sequence[Any]) -> list[Tensor]:
        """Of each clip, or part of one, ``[c, f', h, w]`` float32."""

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        """Tokens of the captions of some clips, at most L each, without making their features."""

    def texts(self, items: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Of their captions, ``[n, 1, L, W]`` float32, and which tokens are in use, ``[n, L]`` on the CPU."""


class Encoders:
    """A ``Source`` that encodes ``Clip``s."""

    def __init__(self, vae: Any, text_encoder: Any, device: torch.device) -> None:
        self.vae, self.text_encoder, self.device = vae, text_encoder, device
        self.channels, self.width, self.max_length = (
            vae.channels,
            text_encoder.width,
            text_encoder.max_length,
        )

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        return self.vae.latent_size(*shape)

    def pieces(self, shape: ClipShape) -> list[Piece]:
        frames, latent_frames = shape.num_frames, self.latent_size(shape)[0]
        return independent_pieces(self.vae, num_frames=frames, latent_frames=latent_frames)

    def latents(self, items: Sequence[Clip]) -> list[Tensor]:
        """Items of equal length are encoded together."""
        lengths = [item.video.shape[1] for item in items]
        made: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            places = [place for place, found in enumerate(lengths) if found == length]
            videos = torch.stack([items[place].video for place in places]).to(self.device)
            made |= zip(places, self.vae.encode(scale(videos)).float(), strict=True)
        return [made[place] for place in range(len(items))]

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        counts = [self.text_encoder.num_tokens(caption) for caption in captions]
        return [min(count, self.max_length) for count in counts]

    def texts(self, items: Sequence[Clip]) -> tuple[Tensor, Tensor]:
        """Raises ValueError if the encoder's masks are not as long as it counts."""
        captions = [item.text for item in items]
        y, mask = self.text_encoder.encode(captions)
        mask = mask.cpu()

        counted = self.text_lengths([], captions)
        for caption, length, count in zip(captions, mask.sum(1).tolist(), counted, strict=True):
            if length != count:
                raise ValueError(
                    f"got a mask of {length} tokens for the caption {caption[:80]!r}, of which num_tokens counts "
                    f"{count} (at most max_length); expected the same number; correct encode or num_tokens of "
                    f"{type(self.text_encoder).__name__}"
                )
        return y.to(self.device), mask


@dataclass(frozen=True)
class Features:
    """A micro-batch as one rank has it, whole in shape; of what this rank does not need, latents are NaN (whoever reads
    them by mistake is found out) and captions are one token of zeros."""

    shape: ClipShape
    positions: Tensor  # float32 [B, f, h, w, c]
    y: Tensor  # float32 [B, 1, L, W]
    mask: Tensor  # int64 [B, L] on the CPU
    fps: Tensor  # float32 [B]
    text_lengths: list[
        int
    ]  # tokens of each caption, of those that this rank has no need of as well

    @classmethod
    def filled(
        cls, value: float, num_clips: int, shape: ClipShape, source: Source, device: torch.device
    ) -> Features:
        """Latents of one value, and empty captions."""
        size = source.latent_size(shape)
        return cls(
            shape,
            torch.full((num_clips, *size, source.channels), value, device=device),
            torch.zeros(num_clips, 1, source.max_length, source.width, device=device),
            torch.zeros(num_clips, source.max_length, dtype=torch.int64),
            torch.full((num_clips,), 24.0, device=device),
            [0] * num_clips,
        )

    @property
    def latents(self) -> Tensor:
        """``[B, c, f, h, w]``"""
        return self.positions.movedim(-1, 1).contiguous()


class Portion(NamedTuple):
    """The frames of one clip that a rank reads, and the latent frames that it makes of them."""

    place: int  # of the clip in the micro-batch
    frames: slice
    latents: slice

    @property
    def has_caption(self) -> bool:
        return self.frames.start == 0


def deal_pieces(
    places: Sequence[int], pieces: Sequence[Piece], num_ranks: int
) -> list[list[Portion]]:
    """For each rank its portions of the clips at ``places``, each of which falls into ``pieces``."""
    dealt: list[list[Portion]] = []
    for rank in range(num_ranks):
        start, stop = balanced_run(len(places) * len(pieces), num_ranks, rank)
        dealt.append([])
        for number, place in enumerate(places):
            first = max(start - number * len(pieces), 0)
            last = min(stop - number * len(pieces), len(pieces)) - 1
            if first <= last:
                frames = slice(pieces[first].frames.start, pieces[last].frames.stop)
                latents = slice(pieces[first].latents.start, pieces[last].latents.stop)
                dealt[-1].append(Portion(place, frames, latents))
    return dealt


class Division(NamedTuple):
    """Who makes what of the clips at some places of a micro-batch, and this rank's part in handing it out."""

    portions: list[list[Portion]]  # of each rank
    delivery: ExchangePlan  # of latent positions, numbered over B, f, h, w
    clips: list[list[bool]]  # for each rank the clips that it needs something of


class SharedClips:
    """Clips of micro-batches as ``Features``, read and encoded by the ranks of ``mesh.sp_group`` together.

    Args:
        model: the parallelized model, which says what each rank needs.
        dataset: by ``Sample``; what it gives for parts of clips is for ``source``.
        whole: give every rank everything in the first exchange, for a model that verifies its first batch.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        model: Any,
        dataset: Dataset,
        plan: BatchPlan,
        source: Source,
        broken: BrokenClips,
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        self.mesh, self.model, self.dataset, self.plan = mesh, model, dataset, plan
        self.source, self.broken, self.device, self.whole = source, broken, device, whole
        self._divide = lru_cache(maxsize=16)(self._division)

    def samples(self, micro_batch: MicroBatch) -> list[Sample]:
        """What this rank reads of a micro-batch."""
        return self._samples(micro_batch, micro_batch.ids, range(len(micro_batch.ids)))

    def take(self, micro_batch: MicroBatch, items: Sequence[Any]) -> tuple[list[int], Features]:
        """The ids to train on and their features, given what was read for ``samples``. Collective in the group.

        Raises:
            ValueError: if no replacement of a broken clip can be read either.
        """
        ids = list(micro_batch.ids)
        places = list(range(len(ids)))
        features = Features.filled(
            float("nan"), len(ids), micro_batch.shape, self.source, self.device
        )
        for attempt in range(MAX_REPLACEMENTS + 1):
            places = self.share(features, ids, places, items)
            if not places:
                break
            for place in places:
                ids[place] = self.plan.replacement(micro_batch, micro_batch.ids[place], attempt)
            self.broken.replaced += len(places) if attempt == 0 else 0
            items = [self.dataset[sample] for sample in self._samples(micro_batch, ids, places)]
        else:
            raise ValueError(
                f"got no readable clip in {MAX_REPLACEMENTS} tries for one place of a batch of {micro_batch.shape} "
                f"(the last broken file: {self.broken.last}); expected video files; check the manifest's paths"
            )
        self.whole = False
        self.broken.count_used(ids)
        return ids, features

    def _samples(
        self, micro_batch: MicroBatch, ids: Sequence[int], places: Sequence[int]
    ) -> list[Sample]:
        """What this rank reads of the clips at ``places``."""
        dealt = deal_pieces(places, self.source.pieces(micro_batch.shape), self.mesh.sp_size)
        epoch, shape = micro_batch.epoch, micro_batch.shape
        own = dealt[self.mesh.sp_rank]
        return [Sample(ids[p.place], epoch, shape, (p.frames.start, p.frames.stop)) for p in own]

    @torch.no_grad()
    def share(
        self, features: Features, ids: Sequence[int], places: Sequence[int], items: Sequence[Any]
    ) -> list[int]:
        """Encode what this rank has read of the clips at ``places`` of ``ids``, and fill in what it needs of all.

        Returns:
            The places of clips that some rank could not read, the same on all. Collective in the group.
        """
        division = self._divide(features.shape, len(features.fps), tuple(places), self.whole)
        self.broken.note(items)
        rates = self._agree(division, places, items)
        for place, rate in rates.items():
            features.fps[place].fill_(rate)
        self._note_lengths(features, ids, places)
        sent = self._made(division, items, features)
        received = sent if self.mesh.sp_size == 1 else self._exchange(division, sent, features)
        self._fill(division, received, features)
        return [place for place in places if place not in rates]

    def _agree(
        self, division: Division, places: Sequence[int], items: Sequence[Any]
    ) -> dict[int, float]:
        """The frame rates of the clips that all ranks could read, by place. Collective in the group, on the host."""
        own = division.portions[self.mesh.sp_rank]
        unreadable, rates = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0.0)
        for portion, item in zip(own, items, strict=True):
            if isinstance(item, BrokenClip):
                unreadable[portion.place] = 1.0
            else:
                rates[portion.place] = item.fps

        both = torch.tensor([list(unreadable.values()), list(rates.values())], dtype=torch.float64)
        if self.mesh.sp_size > 1:
            record("clips", backward=False, elements=both.numel(), element_size=8)
            with communicating("clips", both.device):
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.mesh.host_group)
        found = zip(places, *both.tolist(), strict=True)
        return {place: rate for place, is_unreadable, rate in found if not is_unreadable}

    def _note_lengths(self, features: Features, ids: Sequence[int], places: Sequence[int]) -> None:
        clips = [ids[place] for place in places]
        captions = [self.dataset.rows[clip].text for clip in clips]  # type: ignore[attr-defined]
        for place, length in zip(places, self.source.text_lengths(clips, captions), strict=True):
            features.text_lengths[place] = length

    def _made(self, division: Division, items: Sequence[Any], features: Features) -> list[Tensor]:
        """What each rank gets of what this one has made, numbers in a row: latents, captions."""
        own = division.portions[self.mesh.sp_rank]
        latents, captions = (
            self._latents(own, items, features),
            self._captions(own, items, features),
        )
        picked = to_device(division.delivery.pack, self.device).split(division.delivery.send_splits)
        sent = []
        for wanted, numbers in zip(division.clips, picked, strict=True):
            texts = [text for place, text in captions.items() if wanted[place]]
            sent.append(torch.cat([latents[numbers].flatten(), *texts]))
        return sent

    def _latents(self, own: Sequence[Portion], items: Sequence[Any], features: Features) -> Tensor:
        """The latent positions of this rank's portions, ``[n, c]``; zeros for what could not be read."""
        made = [
            torch.zeros_like(features.positions[portion.place, portion.latents]) for portion in own
        ]
        readable = [number for number, item in enumerate(items) if not isinstance(item, BrokenClip)]
        for number, z in zip(
            readable, self.source.latents([items[n] for n in readable]), strict=True
        ):
            made[number] = z.movedim(0, -1)  # [f', h, w, c]
        none = features.positions.new_zeros(0, features.positions.shape[-1])
        return torch.cat([none, *(z.flatten(0, 2) for z in made)])

    def _captions(
        self, own: Sequence[Portion], items: Sequence[Any], features: Features
    ) -> dict[int, Tensor]:
        """The captions of this rank's portions by place, ``[L * W]`` each; zeros for what could not be read."""
        spoken = {
            portion.place: item
            for portion, item in zip(own, items, strict=True)
            if portion.has_caption
        }
        made = {place: features.y.new_zeros(features.y[0].numel()) for place in spoken}
        readable = {
            place: item for place, item in spoken.items() if not isinstance(item, BrokenClip)
        }
        if readable:
            y, _ = self.source.texts(list(readable.values()))
            made |= zip(readable, y.flatten(1), strict=True)
        return made

    def _exchange(self, division: Division, sent: list[Tensor], features: Features) -> list[Tensor]:
        """What the ranks of the group have made for this one, rank by rank."""
        sizes = [sum(self._sizes(division, rank, features)) for rank in range(self.mesh.sp_size)]
        assert self.mesh.sp_group is not None
        arrived, _ = all_to_all(
            torch.cat(sent),
            [len(z) for z in sent],
            sizes,
            self.mesh.sp_group,
            kind="data",
            backward=False,
        )
        return list(arrived.split(sizes))

    def _sizes(self, division: Division, sender: int, features: Features) -> list[int]:
        """How many numbers come from a rank: latents, captions."""
        texts = len(self._spoken(division, sender))
        latents = division.delivery.recv_splits[sender] * features.positions.shape[-1]
        return [latents, texts * features.y[0].numel()]

    def _spoken(self, division: Division, sender: int) -> list[int]:
        """The places of the captions that this rank gets from another one."""
        wanted = division.clips[self.mesh.sp_rank]
        return [p.place for p in division.portions[sender] if p.has_caption and wanted[p.place]]

    def _fill(self, division: Division, received: list[Tensor], features: Features) -> None:
        """Put in place what the ranks have sent."""
        parts = [z.split(self._sizes(division, rank, features)) for rank, z in enumerate(received)]
        latents, texts = (torch.cat(column) for column in zip(*parts, strict=True))
        entries = features.positions.flatten(0, 3)  # a view, [B * f * h * w, c]
        entries[to_device(division.delivery.place, self.device)] = latents.view(
            -1, entries.shape[1]
        )
        places = [
            place for rank in range(self.mesh.sp_size) for place in self._spoken(division, rank)
        ]
        for place, y in zip(places, texts.view(len(places), *features.y.shape[1:]), strict=True):
            features.y[place] = y
            features.mask[place] = 0
            features.mask[place, : features.text_lengths[place]] = 1

    def _division(
        self, shape: ClipShape, num_clips: int, places: tuple[int, ...], whole: bool
    ) -> Division:
        size, ranks = self.source.latent_size(shape), self.mesh.sp_size
        portions = deal_pieces(places, self.source.pieces(shape), ranks)
        numbers = torch.arange(num_clips * size[0] * size[1] * size[2]).view(num_clips, *size)
        none = numbers.new_zeros(0)
        made = [
            torch.cat([none, *(numbers[p.place, p.latents].flatten() for p in own)])
            for own in portions
        ]
        wanted = [torch.ones(numbers.numel(), dtype=torch.bool) for _ in range(ranks)]
        if ranks > 1 and not whole:
            grid = self.model.config.grid(num_clips, size)
            wanted = [_positions(ends, numbers) for ends in held_rows(self.model, grid)]
        clips = [positions.view(num_clips, -1).any(1).tolist() for positions in wanted]
        return Division(portions, plan_delivery(made, wanted, self.mesh.sp_rank), clips)


def _positions(ends: Sequence[Any], numbers: Tensor) -> Tensor:
    """The latent positions, of those numbered from 0 in ``numbers`` ``[B, f, h, w]``, that lie in some rows: bool."""
    found = torch.zeros(numbers.numel() + 1, dtype=torch.bool)
    for rows in ends:
        found[rows.slice(numbers + 1).flatten()] = True  # 0 is what pads patches
    return found[1:]
