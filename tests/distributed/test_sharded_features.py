"""An SP group reads and encodes each clip once: who does what, and one-process results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_weights import draw_weights
from ranks import run_ranks
from runs import batch_of, write_toy_set
from tiny_models import TINY
from torch import Tensor
from worlds import in_worlds

from opensora_sp.config.components import ModelSpec
from opensora_sp.data.dataset import Clip, ClipShape, CorruptSample, Sample, VideoTextDataset
from opensora_sp.data.manifest import Entry
from opensora_sp.data.sampler import MicroBatchPlan
from opensora_sp.diffusion import rank_loss
from opensora_sp.encoders import independent_pieces
from opensora_sp.encoders.interface import Piece
from opensora_sp.encoders.open_sora_vae_v13 import OpenSoraVAEv13, build_network
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.batch import BatchMaker
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.exchange import distribute_pieces
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.features.sources import DegradedClips, Encoders
from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize
from opensora_sp.parallel.layout import plan_delivery

CPU = torch.device("cpu")
WORDS = 6  # tokens of a caption


def frames_of(count: int) -> list[Piece]:
    return [Piece(slice(i, i + 1), slice(i, i + 1)) for i in range(count)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_pieces_are_distributed_once_and_evenly(num_ranks: int) -> None:
    chunked = SimpleNamespace(chunk_frames=4, chunk_latent_frames=2)
    kinds = [
        frames_of(1),
        frames_of(5),
        independent_pieces(chunked, num_frames=11, latent_frames=6),
    ]
    for pieces in kinds:
        for places in ([0], [0, 1], [2, 5, 6], list(range(7))):
            shares = distribute_pieces(places, pieces, num_ranks)
            portions = list(chain.from_iterable(shares))
            for axis in ("frames", "latents"):
                found, last = [], getattr(pieces[-1], axis).stop
                for portion in portions:
                    run = getattr(portion, axis)
                    assert run.start < run.stop
                    found += [(portion.place, i) for i in range(run.start, run.stop)]
                assert found == list(product(places, range(last)))

            starts = [piece.frames.start for piece in pieces]
            counts = []
            for share in shares:
                held = [sum(p.frames.start <= s < p.frames.stop for s in starts) for p in share]
                counts.append(sum(held))
            assert max(counts) - min(counts) <= 1
            assert sorted(p.place for p in portions if p.has_caption) == places


def test_a_delivery_sends_every_rank_what_it_needs() -> None:
    rng = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 3, 5):
        for _ in range(20):
            made = [
                part.sort().values for part in torch.randperm(40, generator=rng).tensor_split(ranks)
            ]
            wanted = [
                torch.rand(40, generator=rng) < torch.rand((), generator=rng) for _ in range(ranks)
            ]
            plans = [plan_delivery(made, wanted, rank) for rank in range(ranks)]
            sent = [
                made[rank][plan.pack].split(plan.send_splits) for rank, plan in enumerate(plans)
            ]

            for rank, plan in enumerate(plans):
                assert [len(of_sender[rank]) for of_sender in sent] == plan.recv_splits
                arrived = torch.cat([of_sender[rank] for of_sender in sent])
                assert torch.equal(arrived, plan.unpack)
                # Each rank receives what it needs, once.
                assert torch.equal(arrived.sort().values, wanted[rank].nonzero().flatten())


def test_parts_of_a_clip_are_cut_from_the_same_place(tmp_path: Path) -> None:
    manifest = write_toy_set(tmp_path, 3)
    dataset = VideoTextDataset(
        str(manifest), transform="resize_random_crop", clip_start="random", seed=3
    )
    for clip in range(3):
        for epoch in range(3):
            whole = Sample(clip, epoch, ClipShape(4, 16, 12))
            parts = [dataset[whole._replace(frames=frames)].video for frames in ((0, 1), (1, 4))]
            assert torch.equal(torch.cat(parts, dim=1), dataset[whole].video)


class Drawn:
    """Clips of noise; ``unreadable(sample)`` says which fail on this rank. Counts frames read."""

    rows = [Entry(Path(f"{i}.mp4"), f"clip {i} of many") for i in range(9)]
    extra = None

    def __init__(self, unreadable=lambda sample: False) -> None:
        self.unreadable, self.frames = unreadable, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: Sample) -> Clip | CorruptSample:
        if self.unreadable(sample):
            return CorruptSample(f"{sample.clip}.mp4", "unreadable here")
        rng = torch.Generator().manual_seed(sample.clip)
        video = torch.randint(256, (3, *sample.shape), generator=rng, dtype=torch.uint8)
        first, stop = sample.frames
        self.frames += stop - first
        key = sample.epoch, sample.clip
        return Clip(video[:, first:stop], self.rows[sample.clip].text, 8.0 + sample.clip, key=key)


class ChunkVAE(PatchPoolVAE):
    """A user's VAE: chunks of four frames are two latent frames; the last chunk may be shorter."""

    chunk = 4

    def __init__(self) -> None:
        super().__init__((2, 4, 4))
        self.chunk_frames, self.chunk_latent_frames = self.chunk, 2

    def encode(self, video: Tensor) -> Tensor:
        return torch.cat(
            [super(ChunkVAE, self).encode(part) for part in video.split(self.chunk, dim=2)], dim=2
        )


@cache
def overlapping_vae() -> OpenSoraVAEv13:
    """Open-Sora 1.3's, small and with random weights: chunks of five frames share a frame."""
    vae = OpenSoraVAEv13.planned(
        from_pretrained="nowhere",
        z_channels=3,
        micro_batch_size=1,
        micro_frame_size=5,
        temporal_overlap=True,
    )
    sizes = dict(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1)
    vae.vae = draw_weights(build_network(dict(encoder=sizes, decoder=sizes), 3, "nowhere"))
    return vae.requires_grad_(False).eval().to(CPU)


VAES = {
    "frames": lambda: PatchPoolVAE((1, 4, 4)),
    "chunks": ChunkVAE,
    "overlapping": overlapping_vae,
    "clips": lambda: PatchPoolVAE((2, 4, 4)),
}


class Counting(Encoders):
    """Encoders that count what they are given."""

    def __init__(self, kind: str) -> None:
        super().__init__(VAES[kind](), HashedBagOfWords(8, WORDS), CPU)
        self.frames = self.captions = 0

    def latents(self, items: Sequence[Clip]) -> list[Tensor]:
        self.frames += sum(item.video.shape[1] for item in items)
        return super().latents(items)

    def text_features(self, items: Sequence[Clip]) -> list[Tensor]:
        self.captions += len(items)
        return super().text_features(items)


CAPTIONS = dict(caption_channels=8, model_max_length=WORDS)
MODEL = dict(TINY, in_channels=3, depth=1, num_heads=2, **CAPTIONS)
MODELS: dict[str, tuple[str, dict]] = {
    "STDiT3": ("STDiT3", dict(pred_sigma=False)),
    "patches of 2 frames": ("STDiT3", dict(pred_sigma=False, patch_size=(2, 2, 2))),
    "windows": ("STDiT3", dict(pred_sigma=False, kernel_size=(2, 2, -1))),
    "full": ("STDiT3", dict(pred_sigma=False, full_attention=True)),
    "STDiT2": ("STDiT2", dict(pred_sigma=True)),
}
SHAPE = ClipShape(7, 28, 20)  # latents of 7 x 5, which patches of 2 do not divide


def make_model(name: str) -> Any:
    kind, options = MODELS[name]
    torch.manual_seed(0)  # for its buffers
    return draw_weights(build_model(kind, **MODEL, **options).double(), seed=1, std=0.2)


def config_of(name: str) -> Any:
    """The part of a config that draws and losses depend on."""
    kind, options = MODELS[name]
    return SimpleNamespace(
        seed=3,
        scheduler={"type": "iddpm" if options.get("pred_sigma") else "rflow"},
        mask_ratios={"random": 0.7},
        mask_types=None,
        model_spec=ModelSpec.parse({"type": kind, **MODEL, **options}),
    )


def gradients(
    model: Any, cfg: Any, ids: list[int], features: Any, world: int, shards: bool
) -> list[Tensor]:
    """Each sample's loss, and the gradient of every parameter, of a batch."""
    batch = batch_of(cfg, model.config, features, 5, ids)
    losses = BatchMaker(cfg, CPU).process.losses(
        model(batch.x_t, **batch.inputs, **({"output": "shards"} if shards else {})), batch.noised
    )
    rank_loss(losses, global_samples=len(ids), world_size=world).backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return [losses.detach(), *found]


def encode_clips(
    mesh: Any, model: Any, ids: list[int], encoder: str, shape: ClipShape, **degraded: Any
) -> tuple[Any, Counting, Drawn]:
    """Features of one micro-batch, with what this rank encoded and read for them.

    ``degraded``: arguments of ``DegradedClips``.
    """
    plan = MicroBatchPlan(
        num_samples=9, batch_size=len(ids), micro_batches_per_step=1, seed=0, shape=shape
    )
    micro_batch = plan.step(0)[0]._replace(ids=tuple(ids))
    dataset, source = Drawn(), Counting(encoder)
    corrupt = CorruptSamples(dataset.rows, mesh, 1.0)

    made = DegradedClips(source, **degraded) if degraded else source
    clips = ShardedEncoder(mesh, model, dataset, plan, made, corrupt, CPU)
    items = [dataset[sample] for sample in clips.samples(micro_batch)]
    used, features = clips.encode(micro_batch, items)
    assert used == micro_batch and corrupt.read == len(ids) * (mesh.sp_rank == 0)
    return features, source, dataset


def assert_mean_gradients_equal(found: list[Tensor], wanted: list[Tensor], ranks: int) -> None:
    """The first tensor is the losses, of which ranks hold parts; the others are gradients."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        dist.all_reduce(ours)
        mean = ours / ranks if number else ours
        largest = float(theirs.abs().max() + 1e-30)
        torch.testing.assert_close(mean, theirs.to(mean.dtype), rtol=1e-9, atol=1e-9 * largest)


def shared(
    mesh: SequenceMesh, name: str, encoder: str, ids: list[int], options: dict, shape: ClipShape
) -> dict[str, Any]:
    """What this rank did for one micro-batch, after a comparison with one process."""
    cfg, model = config_of(name), make_model(name)

    one = SequenceMesh.imagined(1, 0)
    alone, *_ = encode_clips(one, model, ids, encoder, shape)
    assert not alone.latents.isnan().any()
    wanted = gradients(model, cfg, ids, alone, 1, False)

    parallelize(model, mesh, **options)
    with CommLedger() as counter:
        features, source, dataset = encode_clips(mesh, model, ids, encoder, shape)
    found = gradients(model, cfg, ids, features, mesh.sp_size, True)
    assert_mean_gradients_equal(found, wanted, mesh.sp_size)

    here = ~features.latents.isnan()
    held = here.flatten(1).any(1)
    assert features.text_lengths == alone.mask.sum(1).tolist() and all(features.text_lengths)
    assert torch.equal(features.latents[here], alone.latents[here])
    assert torch.equal(features.fps, alone.fps)
    assert torch.equal(features.y[held], alone.y[held])
    assert torch.equal(features.mask[held], alone.mask[held])
    return dict(
        read=dataset.frames,
        encoded=source.frames,
        captions=source.captions,
        sent=counter.bytes["data", "forward"],
        needed=int(here[:, 0].sum()),
        held=int(held.sum()),
        calls=counter.calls["data", "forward"],
        pieces=len(source.pieces(shape)),
        agreed=counter.bytes["clips", "forward"],
    )


CASES: list[tuple[str, str, list[int], dict, ClipShape]] = [
    ("STDiT3", encoder, ids, {}, SHAPE)
    for encoder, ids in product(("frames", "chunks", "clips"), ([4], [1, 7], [3, 0, 8, 5, 2]))
]
CASES += [("STDiT3", "overlapping", ids, {}, SHAPE) for ids in ([4], [1, 7])]
CASES += [(name, "frames", [2, 6, 1], {}, SHAPE) for name in MODELS if name != "STDiT3"]
CASES += [
    ("patches of 2 frames", "chunks", [8], {}, SHAPE),
    ("STDiT3", "frames", [5], {}, ClipShape(1, 40, 40)),
]
CASES += [
    ("windows", "frames", [5], {}, ClipShape(2, 28, 20)),
    ("STDiT2", "clips", [2, 3], {}, SHAPE),
]
CASES += [
    ("STDiT3", "frames", [4, 1], dict(strategy=s), SHAPE) for s in ("ulysses", "split_gather")
]
CASES += [("STDiT3", "chunks", [4, 1, 0], dict(strategy="ulysses"), SHAPE)]
WORLDS = [2, 3]


DEGRADED = dict(
    seed=3,
    prob={"gaussian_pixel": 0.7, "downsample_temporal": 0.7},
    strength={"gaussian_pixel": 0.4, "downsample_temporal": [2, 4]},
)


def share_degraded() -> None:
    mesh, cfg = SequenceMesh(dist.get_world_size()), config_of("STDiT3")
    for ids in ([4], [3, 0, 8]):
        model = make_model("STDiT3")
        one = SequenceMesh.imagined(1, 0)
        alone, *_ = encode_clips(one, model, ids, "frames", SHAPE, **DEGRADED)
        degraded, true = alone.latents.chunk(2, dim=1)
        assert not torch.equal(degraded, true)
        wanted = gradients(model, cfg, ids, alone, 1, False)

        parallelize(model, mesh)
        features, *_ = encode_clips(mesh, model, ids, "frames", SHAPE, **DEGRADED)
        here = ~features.latents.isnan()
        assert not here.all() and torch.equal(features.latents[here], alone.latents[here])
        found = gradients(model, cfg, ids, features, mesh.sp_size, True)
        assert_mean_gradients_equal(found, wanted, mesh.sp_size)


def share_degraded_in_worlds() -> None:
    in_worlds(share_degraded, [(world, ()) for world in (2, 3)])


def test_degraded_clips_are_those_of_one_process() -> None:
    run_ranks(3, share_degraded_in_worlds)


def share_all() -> list:
    mesh = SequenceMesh(dist.get_world_size())
    return [shared(mesh, *case) for case in CASES]


def share_in_worlds() -> list:
    return in_worlds(share_all, [(world, ()) for world in WORLDS])


@pytest.mark.slow
def test_ranks_share_reading_and_encoding_and_the_step_stays_the_same() -> None:
    """Losses and gradients are compared inside, in float64, with one process that does it all."""
    of_ranks = run_ranks(3, share_in_worlds, timeout=300)
    for place, world in enumerate(WORLDS):
        for number, (name, encoder, ids, options, shape) in enumerate(CASES):
            reported = [of_rank[place][number] for of_rank in of_ranks[:world]]
            case = (world, name, encoder, ids, options)
            total, pieces = len(ids) * shape.num_frames, len(ids) * reported[0]["pieces"]
            per_piece = {
                "frames": 1,
                "chunks": ChunkVAE.chunk,
                "overlapping": 5,
                "clips": shape.num_frames,
            }[encoder]

            assert [one["read"] for one in reported] == [one["encoded"] for one in reported], case
            # Every frame once, but those that two chunks share where they are of two ranks.
            shared = pieces - len(ids) if encoder == "overlapping" else 0
            assert 0 <= sum(one["read"] for one in reported) - total <= shared, case
            assert max(one["read"] for one in reported) <= -(-pieces // world) * per_piece, case
            assert sum(one["captions"] for one in reported) == len(ids), case
            assert {one["calls"] for one in reported} == {int(world > 1)}, case

            # Numbers sent: latents that a rank needs and has not made, and captions likewise.
            latents, captions = (
                sum(one["needed"] for one in reported) * 3,
                sum(one["held"] for one in reported) * WORDS * 8,
            )

            assert {one["agreed"] for one in reported} == {2 * 8 * len(ids) * int(world > 1)}, case
            assert sum(one["sent"] for one in reported) <= 4 * (latents + captions), case
            # Whole samples, made where they are needed.
            if world > 1 and len(ids) % world == 0 and not options:
                assert sum(one["sent"] for one in reported) == 0, case


def pick(folder: Path) -> tuple[list[int], list[float], list[str], int, str]:
    logging.getLogger("opensora_sp").addHandler(logging.FileHandler(folder / "log"))
    rank, mesh = dist.get_rank(), SequenceMesh(sp_size=2)
    model = parallelize(make_model("STDiT3"), mesh)
    plan = MicroBatchPlan(
        num_samples=9, batch_size=4, micro_batches_per_step=1, seed=0, shape=SHAPE
    )
    batch = plan.step(0)[0]._replace(ids=(0, 1, 2, 3))

    def clips_of(dataset: Drawn, max_bad_fraction: float, whole: bool = False) -> ShardedEncoder:
        broken = CorruptSamples(dataset.rows, mesh, max_bad_fraction)
        return ShardedEncoder(
            mesh, model, dataset, plan, Counting("frames"), broken, CPU, whole=whole
        )

    clips = clips_of(Drawn(lambda sample: rank == 1 and sample.clip % 2 == 1), 0.25)
    for _ in range(2):  # the same clips are broken in the next epoch too
        with CommLedger() as counter:
            used, features = clips.encode(
                batch, [clips.dataset[sample] for sample in clips.samples(batch)]
            )
        replaced = clips.corrupt.report(CPU)
    assert counter.calls["data", "forward"] == 1 + attempts(plan)
    clips.corrupt.max_bad_fraction = 0.22
    with pytest.raises(ValueError, match=r"got 2 corrupt clips of 8 read, .*at most") as error:
        clips.corrupt.report(CPU)
    hopeless = clips_of(Drawn(lambda sample: True), 1.0)
    with pytest.raises(ValueError, match=r"got no readable clip in 20 tries for a batch of 7"):
        hopeless.encode(batch, [hopeless.dataset[sample] for sample in hopeless.samples(batch)])
    verified = clips_of(Drawn(), 1.0, whole=True)  # all of the first batch, for the bare model
    read = [verified.dataset[sample] for sample in verified.samples(batch)]
    assert [verified.encode(batch, read)[1].latents.isnan().any().item() for _ in range(2)] == [
        False,
        True,
    ]
    expected = torch.stack([Drawn()[Sample(i, 0, SHAPE, (0, 7))].video.float() for i in used.ids])
    made = PatchPoolVAE((1, 4, 4)).encode(expected / 127.5 - 1)
    here = ~features.latents.isnan()
    torch.testing.assert_close(features.latents[here], made[here])
    return (
        list(used.ids),
        features.fps.tolist(),
        sorted(clips.corrupt.found),
        replaced,
        str(error.value),
    )


def attempts(plan: MicroBatchPlan) -> int:
    """Tries until there is a clip for place 3, of which each rank reads a half: an even one."""
    drawn = [plan.substitute(plan.step(0)[0], 3, attempt) for attempt in range(20)]
    return next(number for number, clip in enumerate(drawn, 1) if clip % 2 == 0)


def test_ranks_agree_on_what_replaces_a_clip_that_one_of_them_cannot_read(tmp_path: Path) -> None:
    """Rank 1 reads clips 2 and 3 of the batch, and a part of every replacement."""
    first, second = run_ranks(2, pick, tmp_path)
    assert first == second
    ids, fps, broken, replaced, _ = first
    plan = MicroBatchPlan(
        num_samples=9, batch_size=4, micro_batches_per_step=1, seed=0, shape=SHAPE
    )
    assert ids[:3] == [0, 1, 2] and fps == [8.0 + i for i in ids]
    # From (seed, epoch, index) alone.
    assert ids[3] == plan.substitute(plan.step(0)[0], 3, attempts(plan) - 1)
    assert replaced == 2 and "3.mp4" in broken

    reported = (tmp_path / "log").read_text().splitlines()
    assert sorted(reported) == [f"skipped a clip: {path} (unreadable here)" for path in broken]


class Miscounting(HashedBagOfWords):
    """Counts two tokens too few in the caption of one clip."""

    def num_tokens(self, text: str) -> int:
        return super().num_tokens(text) - 2 * (text == "clip 3 of many")


def miscount() -> None:
    mesh = SequenceMesh(1)
    model = parallelize(make_model("STDiT3"), mesh)
    plan = MicroBatchPlan(
        num_samples=9, batch_size=2, micro_batches_per_step=1, seed=0, shape=SHAPE
    )
    dataset, source = Drawn(), Counting("frames")
    source.text_encoder = Miscounting(8, WORDS)
    corrupt = CorruptSamples(dataset.rows, mesh, 1.0)
    encoder = ShardedEncoder(mesh, model, dataset, plan, source, corrupt, CPU)
    batch = plan.step(0)[0]._replace(ids=(1, 3))
    with pytest.raises(ValueError, match="got features of 6 tokens for .* num_tokens counts 5 "):
        encoder.encode(batch, [dataset[sample] for sample in encoder.samples(batch)])


def test_a_text_encoder_that_miscounts_is_refused() -> None:
    run_ranks(1, miscount)
