"""Text lengths are host integers: no sampling step reads them back from the device.

The device of these tests is "meta", whose numbers nobody can read; ``test_host_syncs.py`` records
the host syncs of training steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import TINY

from opensora_sp.config import load_inference_config
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.sources import Encoders
from opensora_sp.models import build_model
from opensora_sp.models.layers import used_tokens
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of

META, CPU = torch.device("meta"), torch.device("cpu")
WORDS = 6  # tokens of a caption at most
CAPTIONS = dict(caption_channels=8, model_max_length=WORDS)
MODEL = dict(TINY, in_channels=3, depth=1, num_heads=2, pred_sigma=False, **CAPTIONS)


def model_on(device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        return build_model("STDiT3", **MODEL)


def encoders_on(device: torch.device) -> Encoders:
    return Encoders(
        PatchPoolVAE((1, 4, 4)).to(device), HashedBagOfWords(8, WORDS).to(device), device
    )


def sampling_config(folder: Path) -> Any:
    lines = [
        f"model = {dict(MODEL, type='STDiT3')}",
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
