"""Latents to frames, piece by piece, shared by the ranks of an SP group.

A clip falls into pieces that its autoencoder decodes without the rest (``independent_pieces``). In
each turn every rank decodes one piece, and the frames go to the rank that writes their video. So a
rank holds as many decoded pieces as there are ranks at most, however long the clip is; and a piece
is decoded by the same call whoever does it, so frames are the same bits on any number of processes.

Legend: B videos, c latent channels, f x h x w latent size, P ranks of the SP group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.data import to_frames
from opensora_sp.encoders import Piece, independent_pieces
from opensora_sp.parallel import SequenceMesh

Frames = Iterator[tuple[int, np.ndarray]]
"""(place in the batch, frames uint8 ``[F, height, width, 3]``), the pieces of one video in their
order.
"""


@dataclass(frozen=True)
class Unit:
    """A piece of one loop of one video; the first ``skipped`` frames of it are those of the loop
    before.
    """

    video: int
    part: int
    piece: Piece
    skipped: int

    @property
    def num_frames(self) -> int:
        return self.piece.frames.stop - self.piece.frames.start - self.skipped


def decode(
    vae: Any,
    parts: Sequence[Tensor],
    *,
    num_frames: int,
    size: tuple[int, int],
    overlap: int,
    mesh: SequenceMesh,
) -> Frames:
    """Decode a batch; each rank is given the frames of the videos that it writes (``writer_of``).
    Collective.

    Args:
        parts: latents ``[B, c, f, h, w]`` of each loop, equal on all ranks.
        num_frames: frames of a loop.
        size: height and width of the videos.
        overlap: latent frames that a loop shares with the one before; their frames are left out.
    """
    count, _, latent_frames = parts[0].shape[:3]
    pieces = grouped(
        independent_pieces(vae, num_frames=num_frames, latent_frames=latent_frames), vae
    )
    shared = frames_of(vae, overlap, num_frames, size) if len(parts) > 1 else 0
    units = [
        one for part in range(len(parts)) for one in _units(part, pieces, shared if part else 0)
    ]
    for turn in turns(units, count, mesh.sp_size):
        frames = None
        if mesh.sp_rank < len(turn):
            unit = turn[mesh.sp_rank]
            frames = _decode_one(vae, parts[unit.part][unit.video], unit, size)
        yield from _to_writers(turn, frames, mesh)


def collected(frames: Frames, count: int) -> list[np.ndarray]:
    """The videos of a batch of ``count``, whole; of those that this rank does not write no frame."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(count)]
    for place, piece in frames:
        pieces[place].append(piece)
    return [
        np.concatenate(of_one) if of_one else np.empty((0, 0, 0, 3), np.uint8) for of_one in pieces
    ]


def writer_of(video: int, mesh: SequenceMesh) -> int:
    """The rank of the SP group that writes the ``video``-th of a batch."""
    return video % mesh.sp_size


def grouped(pieces: Sequence[Piece], vae: Any) -> list[Piece]:
    """Single frames as many at a time as the autoencoder takes (``micro_batch_size``; None: all);
    chunks one by one.
    """
    alone = getattr(vae, "chunk_latent_frames", None) == 1
    many = (getattr(vae, "micro_batch_size", 1) or len(pieces)) if alone else 1
    runs = [pieces[i : i + many] for i in range(0, len(pieces), many)]
    return [
        Piece(
            slice(run[0].frames.start, run[-1].frames.stop),
            slice(run[0].latents.start, run[-1].latents.stop),
        )
        for run in runs
    ]


def frames_of(vae: Any, latent_frames: int, num_frames: int, size: tuple[int, int]) -> int:
    """Frames of a video, ``num_frames`` at most, that so many latent frames stand for."""
    counts = range(1, num_frames + 1)
    return max((n for n in counts if vae.latent_size(n, *size)[0] <= latent_frames), default=0)


def turns(units: Sequence[Unit], num_videos: int, ranks: int) -> Iterator[list[Unit]]:
    """What the ranks decode at a time, one unit each at most; ``units`` are those of the first
    video.

    P videos at a time are decoded by those who write them, so that nothing is sent; the rest is
    shared piece by piece.
    """
    whole = num_videos - num_videos % ranks
    for first in range(0, whole, ranks):
        for unit in units:
            yield [replace(unit, video=video) for video in range(first, first + ranks)]
    rest = [replace(unit, video=video) for video in range(whole, num_videos) for unit in units]
    for start in range(0, len(rest), ranks):
        yield rest[start : start + ranks]


def _units(part: int, pieces: Sequence[Piece], shared: int) -> Iterator[Unit]:
    for piece in pieces:
        skipped = max(0, shared - piece.frames.start)
        if skipped < piece.frames.stop - piece.frames.start:
            yield Unit(0, part, piece, skipped)


@torch.no_grad()
def _decode_one(vae: Any, latents: Tensor, unit: Unit, size: tuple[int, int]) -> np.ndarray:
    """uint8 ``[F, height, width, 3]`` of one unit of latents ``[c, f, h, w]``."""
    count = unit.piece.frames.stop - unit.piece.frames.start
    video = vae.decode(latents[None, :, unit.piece.latents].float(), num_frames=count)[
        0
    ]  # [3, F, height, width]
    return to_frames(video[:, unit.skipped :, : size[0], : size[1]])


def _to_writers(turn: Sequence[Unit], mine: np.ndarray | None, mesh: SequenceMesh) -> Frames:
    """Send each unit's frames to its writer; yields those that this rank writes. uint8, through the
    hosts' group.
    """
    group, arriving, under_way = mesh.host_group, dict[int, Tensor](), list[Any]()
    shape = torch.tensor(mine.shape[1:] if mine is not None else (0, 0, 0))
    for rank, unit in enumerate(turn):
        writer = writer_of(unit.video, mesh)
        if mesh.sp_rank == rank != writer:
            assert mine is not None and group is not None
            target, tensor = (
                dist.get_global_rank(group, writer),
                torch.from_numpy(np.ascontiguousarray(mine)),
            )
            under_way += [
                dist.isend(shape, target, group, tag=0),
                dist.isend(tensor, target, group, tag=1),
            ]
        elif mesh.sp_rank == writer != rank:
            assert group is not None
            source = dist.get_global_rank(group, rank)
            found = torch.empty(3, dtype=torch.int64)
            dist.recv(found, source, group, tag=0)
            arriving[rank] = torch.empty((unit.num_frames, *found.tolist()), dtype=torch.uint8)
            under_way.append(dist.irecv(arriving[rank], source, group, tag=1))
    for work in under_way:
        work.wait()
    for rank, unit in enumerate(turn):
        if rank == mesh.sp_rank == writer_of(unit.video, mesh):
            assert mine is not None
            yield unit.video, mine
        elif rank in arriving:
            yield unit.video, arriving[rank].numpy()
