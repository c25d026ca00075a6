"""Latents to frames, in pieces that are distributed over the ranks of an SP group.

The autoencoder decodes each piece of a clip independently (``independent_pieces``). In each turn
every rank decodes one piece and sends the frames to the rank that writes their video. So a rank
holds at most P decoded pieces. A piece is decoded by the same call on every rank, so the frames are
bitwise equal on any number of processes.

Frames that neighbouring pieces share (``chunk_overlap``) are the mean of both. Each piece's version
is sent in float32, and the writer keeps it until the next piece arrives.

Legend: B videos, c latent channels, f x h x w latent size, P ranks of the SP group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.data.transforms import to_frames
from opensora_sp.encoders.interface import Piece, decoded_pieces, frames_of
from opensora_sp.parallel import SequenceMesh

Frames = Iterator[tuple[int, np.ndarray]]
"""(index in the batch, frames uint8 ``[F, height, width, 3]``); pieces of a video are in order."""


@dataclass(frozen=True)
class Unit:
    """A piece of one loop of one video.

    Attributes:
        skipped: of its first frames, those that repeat the loop before.
        shared_before, shared_after: numbers of first and last frames that it shares with the units
            before and after it.
    """

    video: int
    part: int
    piece: Piece
    skipped: int
    shared_before: int = 0
    shared_after: int = 0

    @property
    def num_frames(self) -> int:
        return self.piece.frames.stop - self.piece.frames.start - self.skipped


class Decoded(NamedTuple):
    """The frames of a unit.

    Attributes:
        shared_before, shared_after: shared with the units before and after it, float32
            ``[3, F, height, width]`` on the CPU.
        frames: the others, uint8 ``[F, height, width, 3]``.
    """

    shared_before: Tensor
    frames: np.ndarray
    shared_after: Tensor


def decode(
    vae: Any,
    parts: Sequence[Tensor],
    *,
    num_frames: int,
    size: tuple[int, int],
    overlap: int,
    mesh: SequenceMesh,
) -> Frames:
    """Decode a batch; each rank yields frames of the videos that it writes. Collective.

    Args:
        parts: latents ``[B, c, f, h, w]`` of each loop, equal on all ranks.
        num_frames: frames of a loop.
        size: height and width of the videos.
        overlap: latent frames that a loop shares with the one before; their frames are skipped.
    """
    count, _, latent_frames = parts[0].shape[:3]
    pieces = decoded_pieces(vae, num_frames, latent_frames)
    # A single loop overlaps with none, whatever lengths its autoencoder takes.
    skipped = frames_of(vae.latent_size, overlap, num_frames, size) if len(parts) > 1 else 0
    units = _units(len(parts), pieces, skipped)
    last_shared: dict[int, Tensor] = {}
    for turn in turns(units, count, mesh.sp_size):
        decoded = None
        if mesh.sp_rank < len(turn):
            unit = turn[mesh.sp_rank]
            decoded = _decode_one(vae, parts[unit.part][unit.video], unit, size)

        for video, part in _to_writers(turn, decoded, mesh):
            if part.shared_before.shape[1]:
                yield video, to_frames((last_shared[video] + part.shared_before) / 2)
            if len(part.frames):
                yield video, part.frames
            last_shared[video] = part.shared_after


def collected(frames: Frames, count: int) -> list[np.ndarray]:
    """The whole videos of a batch of ``count``; empty for videos that another rank writes."""
    empty = np.empty((0, 0, 0, 3), np.uint8)
    pieces: list[list[np.ndarray]] = [[] for _ in range(count)]
    for video, piece in frames:
        pieces[video].append(piece)
    return [np.concatenate(parts) if parts else empty for parts in pieces]


def writer_of(video: int, mesh: SequenceMesh) -> int:
    """The rank of the SP group that writes the ``video``-th of a batch."""
    return video % mesh.sp_size


def turns(units: Sequence[Unit], num_videos: int, ranks: int) -> Iterator[list[Unit]]:
    """The units decoded in each turn, at most one per rank; ``units`` make one video.

    Of P whole videos each rank decodes the one that it writes, without communication. The units of
    the remaining videos are distributed one by one.
    """
    # No frames are sent as long as each rank has a whole video.
    num_local = num_videos - num_videos % ranks
    for first in range(0, num_local, ranks):
        for unit in units:
            yield [replace(unit, video=video) for video in range(first, first + ranks)]

    distributed: list[Unit] = []
    for video in range(num_local, num_videos):
        distributed += [replace(unit, video=video) for unit in units]
    for start in range(0, len(distributed), ranks):
        yield distributed[start : start + ranks]


def _units(num_parts: int, pieces: Sequence[Piece], shared: int) -> list[Unit]:
    """The units of one video; each part repeats ``shared`` frames of the one before."""
    # Frames that each piece shares with the one before it, and the last one with none after it.
    between = [before.frames.stop - after.frames.start for before, after in pairwise(pieces)]
    overlaps = [0, *between, 0]

    units = []
    for part, number in product(range(num_parts), range(len(pieces))):
        skipped = max(0, shared - pieces[number].frames.start) if part else 0
        unit = Unit(0, part, pieces[number], skipped)
        if unit.num_frames > 0:
            before = max(0, overlaps[number] - skipped)
            after = min(overlaps[number + 1], unit.num_frames)
            units.append(replace(unit, shared_before=before, shared_after=after))
    return units


@torch.no_grad()
def _decode_one(vae: Any, latents: Tensor, unit: Unit, size: tuple[int, int]) -> Decoded:
    """The frames of one unit of latents ``[c, f, h, w]``."""
    num_frames = unit.num_frames + unit.skipped
    decoded = vae.decode(latents[None, :, unit.piece.latents].float(), num_frames=num_frames)
    video = decoded[0, :, unit.skipped :, : size[0], : size[1]]  # [3, F, height, width]

    last = unit.num_frames - unit.shared_after
    before, frames, after = video.tensor_split((unit.shared_before, last), dim=1)
    # Copies, which do not keep the other frames in memory.
    return Decoded(before.float().cpu().clone(), to_frames(frames), after.float().cpu().clone())


def _to_writers(
    turn: Sequence[Unit], decoded: Decoded | None, mesh: SequenceMesh
) -> list[tuple[int, Decoded]]:
    """Send each unit's frames to its writer; returns those that this rank writes.

    They travel through the CPU process group (gloo).
    """
    group: Any = mesh.host_group
    received = []
    for rank, unit in enumerate(turn):
        writer, frames = writer_of(unit.video, mesh), [decoded]
        if mesh.sp_rank == rank != writer:
            dist.send_object_list(frames, dist.get_global_rank(group, writer), group)
        elif mesh.sp_rank == writer != rank:
            dist.recv_object_list(frames, dist.get_global_rank(group, rank), group)
        if mesh.sp_rank == writer:
            assert frames[0] is not None
            received.append((unit.video, frames[0]))
    return received
