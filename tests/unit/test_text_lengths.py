"""Text lengths are host integers from the loader on: no step reads them back from the device.

The same holds for dropped captions. The device of these tests is "meta", whose numbers nobody can
read; ``test_host_syncs.py`` and ``test_cuda_path.py`` record the host syncs of whole steps.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import batch_of

from opensora_sp.config import ModelSpec, load_inference_config
from opensora_sp.data import Clip, ClipShape, Entry, MicroBatchPlan, Sample
from opensora_sp.diffusion import rank_loss
from opensora_sp.encoders import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.batch import BatchMaker
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.features.sources import Encoders
from opensora_sp.models import build_model
from opensora_sp.models.layers import used_tokens
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of
from opensora_sp.training.step_log import Meter

META, CPU = torch.device("meta"), torch.device("cpu")
WORDS = 6  # tokens of a caption at most
CAPTIONS = ["red on blue", "", "a b c d e f g", "white"]  # of 5, 0, more than 6 and 1 tokens
SHAPE = ClipShape(4, 16, 16)
MODEL = dict(
    type="STDiT3",
    in_channels=3,
    caption_channels=8,
    model_max_length=WORDS,
    hidden_size=24,
    depth=1,
    num_heads=2,
    mlp_ratio=2.0,
    pred_sigma=False,
)


class Clips:
    """Four clips of noise."""

    rows = [Entry(Path(f"{i}.mp4"), caption) for i, caption in enumerate(CAPTIONS)]
    extra = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: Sample) -> Clip:
        return Clip(
            torch.zeros(3, *sample.shape, dtype=torch.uint8),
            CAPTIONS[sample.clip],
            8.0 + sample.clip,
        )


def model_on(device: torch.device) -> Any:
    options = dict(MODEL)
    torch.manual_seed(0)
    with device:
        return build_model(options.pop("type"), **options)


def encoders_on(device: torch.device) -> Encoders:
    return Encoders(
        PatchPoolVAE((1, 4, 4)).to(device), HashedBagOfWords(8, WORDS).to(device), device
    )


def training_step(device: torch.device, drop_rate: float) -> tuple[list[int], float]:
    """Lengths that the model packs, and the work that the meter counts, of one micro-batch."""
    plan = MicroBatchPlan(
        num_samples=4, batch_size=4, micro_batches_per_step=1, seed=0, shape=SHAPE
    )
    micro_batch = plan.step(0)[0]._replace(ids=(0, 1, 2, 3))
    model, source, clips = model_on(device), encoders_on(device), Clips()
    mesh = SequenceMesh()
    shared = ShardedEncoder(
        mesh, model, clips, plan, source, CorruptSamples(clips.rows, mesh, 1.0), device
    )
    used, features = shared.encode(
        micro_batch, [clips[sample] for sample in shared.samples(micro_batch)]
    )
    assert used == micro_batch and features.text_lengths == [5, 0, 6, 1]

    cfg = SimpleNamespace(
        seed=3,
        scheduler={"type": "rflow"},
        mask_ratios={"random": 0.7},
        mask_types=None,
        model_spec=ModelSpec.parse(MODEL),
    )
    config = SimpleNamespace(
        patch_size=(1, 2, 2), in_channels=3, class_dropout_prob=drop_rate, drop_path=0.0
    )
    batch = batch_of(cfg, config, features, 5, used.ids)
    meter = Meter(model, CPU, mesh=SequenceMesh(), peak_tflops=1.0)
    meter.count(batch)

    packed: list[list[int]] = []
    embedder, pack = model.y_embedder, model.y_embedder.pack
    embedder.pack = lambda *args: packed.append((made := pack(*args))[1]) or made
    losses = BatchMaker(cfg, device).flow.losses(model(batch.x_t, **batch.inputs), batch.noised)
    rank_loss(losses, global_samples=4, world_size=1).backward()
    return packed[0], meter._work


def test_a_training_step_reads_no_text_length_back() -> None:
    for drop_rate, dropped in ((0.0, False), (0.5, True)):
        lengths, work = training_step(META, drop_rate)
        assert (lengths, work) == training_step(CPU, drop_rate)
        assert (lengths != [5, 1, 6, 1]) == dropped


def sampling_config(folder: Path) -> Any:
    lines = [
        f"model = {MODEL}",
        "num_frames = 4",
        "image_size = (16, 16)",
        "precision = 'fp32'",
        "fps = 8",
    ]
    lines += [
        "vae = dict(type='PatchPoolVAE', pool=(1, 4, 4))",
        "prompts = ['red on blue', 'white', 'white']",
    ]
    lines += [f"text_encoder = dict(type='HashedBagOfWords', width=8, max_length={WORDS})"]
    lines += ["scheduler = dict(type='rflow', num_sampling_steps=2, cfg_scale=4.0)"]
    (folder / "sample.py").write_text("\n".join(lines))
    return load_inference_config(folder / "sample.py")


def sampling_steps(device: torch.device, cfg: Any) -> list[int]:
    """Lengths of the text of a batch of requests, which two steps have used."""
    encoders, model = encoders_on(device), model_on(device)
    pipeline = Pipeline(cfg, model, encoders.vae, encoders.text_encoder, device)
    x, timestep = torch.zeros(6, 3, 4, 4, 4, device=device), torch.zeros(6, device=device)
    with torch.no_grad():
        text = pipeline.encode(requests_of(cfg))
        for _ in range(2):
            assert model(x, timestep, text).shape == x.shape
    return text.lengths


def test_sampling_reads_no_text_length_back(tmp_path: Path) -> None:
    cfg = sampling_config(tmp_path)
    assert sampling_steps(META, cfg) == sampling_steps(CPU, cfg) == [5, 1, 1, WORDS, WORDS, WORDS]


@pytest.mark.parametrize("on_device", ["mask", "drop_caption"])
def test_what_lies_on_the_device_is_read_back(on_device: str) -> None:
    """As the public interface allows; and so this device would notice."""
    model = model_on(META)
    y, mask = torch.zeros(2, 1, WORDS, 8, device="meta"), torch.ones(2, WORDS, dtype=torch.bool)
    inputs = dict(mask=mask, drop_caption=torch.tensor([True, False]))
    model.encode_text(y, **inputs)
    inputs[on_device] = inputs[on_device].to("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        model.encode_text(y, **inputs)


def test_tokens_in_use_may_have_holes() -> None:
    rng = torch.Generator().manual_seed(0)
    embedder = model_on(CPU).y_embedder
    for shape in ((3, 7), (1, 1), (4, 1, 1, 5)):
        mask = (torch.rand(shape, generator=rng) < 0.5).long()
        rows = mask.reshape(-1, shape[-1])
        y = torch.randn(2 * len(rows), 1, shape[-1], 8, generator=rng)
        first_if_none = [row.bool() if row.any() else torch.arange(len(row)) == 0 for row in rows]
        wanted = [text[0, used] for text, used in zip(y, 2 * first_if_none, strict=True)]
        packed, lengths = embedder.pack(y, mask, None)
        assert torch.equal(packed, torch.cat(wanted)) and lengths == [len(text) for text in wanted]
    assert used_tokens(torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])) == [
        [slice(0, 1), slice(2, 4)],
        [slice(0, 1)],
    ]
