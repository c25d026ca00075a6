"""diffusers' ``enable_model_cpu_offload`` with our components, on CUDA's code path.

Functions that run under the stub begin with ``on_``.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cuda_stub import phase, requires_stub, run_on_stub
from torch import Tensor, nn

from opensora_sp.encoders import HashedBagOfWords, ImageVAE
from opensora_sp.encoders.loading import FrozenEncoder
from opensora_sp.models import build_model

pytestmark = requires_stub
MODEL = dict(
    in_channels=4, caption_channels=8, model_max_length=12, hidden_size=24, depth=2, num_heads=3
)
COMPONENTS = ("text_encoder", "transformer", "vae")


class Words(FrozenEncoder):
    """The stand-in with weights, which have to be where features are made."""

    width, max_length = 8, 12

    def __init__(self) -> None:
        super().__init__(offload=False)
        self.words, self.linear = HashedBagOfWords(8, 12), nn.Linear(8, 8)

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        features, mask = self.words.encode(texts)
        return self.linear(features), mask

    def num_tokens(self, text: str) -> int:
        return self.words.num_tokens(text)


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("vae")
    AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained(folder)
    return folder


def on_offload(folder: str) -> list[tuple[str, ...]]:
    """Which components are on the GPU whenever one computes, in two calls, and after them."""
    from opensora_sp.integrations.diffusers import OpenSoraPipeline, OpenSoraScheduler

    vae = ImageVAE(folder)
    pipeline = OpenSoraPipeline(
        build_model("STDiT3", **MODEL).requires_grad_(False).eval(),
        vae,
        Words(),
        OpenSoraScheduler.of(dict(num_sampling_steps=2)),
        dict(type="VideoAutoencoderKL", from_pretrained=folder),
        dict(type="HashedBagOfWords", width=8, max_length=12),
    )
    pipeline.set_progress_bar_config(disable=True)
    seen: list[tuple[str, ...]] = []

    def note(what: str) -> None:
        components = {name: next(getattr(pipeline, name).parameters()) for name in COMPONENTS}
        seen.append((what, *(name for name, one in components.items() if one.is_cuda)))

    for module, name in (
        (pipeline.text_encoder.linear, "text"),
        (pipeline.transformer.x_embedder, "step"),
        (vae.frames.module.encoder, "encode"),
        (vae.frames.module.decoder, "decode"),
    ):
        module.register_forward_pre_hook(lambda *_, name=name: note(name))

    pipeline.enable_model_cpu_offload()
    image = np.zeros((30, 30, 3), np.uint8)
    # Nothing computes here, and what was never computed may not be finite.
    with patch.object(Tensor, "isfinite", lambda self: torch.ones(1, dtype=torch.bool)):
        for number in range(2):
            with phase(f"call {number}"):
                pipeline("a", image, num_frames=3, height=28, width=24, output_type="np")
            note("after")
    return seen


def test_one_component_at_a_time_is_on_the_device(vae_folder: Path) -> None:
    recording = run_on_stub(on_offload, str(vae_folder))
    assert not recording.refused
    call = [
        ("encode", "vae"),
        ("text", "text_encoder"),
        ("step", "transformer"),
        ("step", "transformer"),
        ("decode", "vae"),
        ("after",),
    ]
    assert recording.result == call * 2
