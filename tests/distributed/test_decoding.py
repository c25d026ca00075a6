"""Decoding shared by ranks: the bits of one process, even shares, memory of a piece."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from ranks import run_ranks

from opensora_sp.encoders.standins import PatchPoolVAE
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.live_peak import LivePeak
from opensora_sp.sampling.decoding import Unit, collected, decode, turns

SIZE = (10, 13)


class ChunkedVAE:
    """A chunk of four frames, or fewer at the end, is two latent frames; each depends on all."""

    channels, scale, chunk_frames, chunk_latent_frames = 3, 1.0, 4, 2

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        whole, rest = divmod(num_frames, 4)
        return 2 * whole + -(-rest // 2), height, width

    def decode(self, latents: torch.Tensor, *, num_frames: int) -> torch.Tensor:
        mixed = latents + latents.mean(dim=2, keepdim=True)
        return mixed.repeat_interleave(2, dim=2)[:, :, :num_frames]


class OverlappingVAE:
    """Chunks of five frames are two latent frames; neighbours share a frame, the mean of both."""

    channels, scale, chunk_frames, chunk_latent_frames, chunk_overlap = 3, 1.0, 5, 2, 1

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        return 2 * max(1, -(-(num_frames - 1) // 4)), height, width

    def decode(self, latents: torch.Tensor, *, num_frames: int) -> torch.Tensor:
        chunks = [z.repeat_interleave(3, dim=2)[:, :, :5] for z in latents.split(2, dim=2)]
        whole = chunks[0]
        for chunk in chunks[1:]:
            shared = (whole[:, :, -1:] + chunk[:, :, :1]) / 2
            whole = torch.cat([whole[:, :, :-1], shared, chunk[:, :, 1:]], dim=2)
        return whole[:, :, :num_frames]


class FrameVAE(PatchPoolVAE):
    """Frame by frame, three at a time."""

    micro_batch_size = 3

    def __init__(self) -> None:
        super().__init__(pool=(1, 2, 2))


VAES = {
    "chunks": ChunkedVAE,
    "overlapping": OverlappingVAE,
    "frames": FrameVAE,
    "whole": lambda: PatchPoolVAE((2, 2, 2)),
}
CASES = list(product(VAES, (1, 2, 3, 4), (1, 2)))


def decode_all() -> list[tuple[list[torch.Tensor], int]]:
    """For each case the videos that this rank writes, and how many pieces it decoded."""
    mesh = SequenceMesh(dist.get_world_size() if dist.is_initialized() else 1)
    found = []
    for name, videos, loops in CASES:
        vae = VAES[name]()
        size = vae.latent_size(11, *SIZE)
        generator = torch.Generator().manual_seed(videos)
        parts = [torch.randn(videos, 3, *size, generator=generator) for _ in range(loops)]

        with mock.patch.object(vae, "decode", wraps=vae.decode) as decoder:
            frames = decode(vae, parts, num_frames=11, size=SIZE, overlap=2, mesh=mesh)
            written = [torch.from_numpy(video) for video in collected(frames, videos)]
        found.append((written, decoder.call_count))
    return found


def test_frames_are_those_of_one_process_and_the_work_is_shared() -> None:
    num_ranks = 3
    alone, ranks = decode_all(), run_ranks(num_ranks, decode_all)
    for case, (wanted, calls), *of_rank in zip(CASES, alone, *ranks, strict=True):
        for video, one in enumerate(wanted):
            # One rank writes it.
            (ours,) = (videos[video] for videos, _ in of_rank if len(videos[video]))
            assert torch.equal(ours, one), case
            overlap = {"chunks": 4, "overlapping": 5, "frames": 2, "whole": 4}[case[0]]
            assert len(one) == 11 + (case[2] - 1) * (11 - overlap), case
        shares = [own for _, own in of_rank]
        assert sum(shares) == calls and max(shares) <= math.ceil(calls / num_ranks), (case, shares)


def test_peak_memory_is_that_of_a_piece() -> None:
    def peak(num_frames: int) -> int:
        vae = ChunkedVAE()
        latents = torch.randn(1, 3, *vae.latent_size(num_frames, 64, 64))
        with LivePeak() as memory:
            for _ in decode(
                vae,
                [latents],
                num_frames=num_frames,
                size=(64, 64),
                overlap=1,
                mesh=SequenceMesh(1),
            ):
                pass
        return memory.peak

    assert 0 < peak(8) == peak(80) < 3 * 80 * 64 * 64 * 4


def test_nothing_is_sent_where_each_rank_writes_a_video() -> None:
    units = [Unit(0, 0, SimpleNamespace(), k) for k in range(5)]
    for turn in turns(units, 6, 3):
        assert [unit.video % 3 for unit in turn] == [0, 1, 2]  # decoded by its writer
    assert sum(len(turn) for turn in turns(units, 7, 3)) == 35
