"""STDiT3-XL/2 with T5-XXL and its autoencoder, sampling on a GPU of 12 GB.

The whole pipeline of the release in its sizes, on CUDA's code path. Functions that run under the
stub begin with ``on_``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_stub import phase, requires_stub, run_on_stub
from torch import Tensor

from opensora_sp.config import InferenceConfig
from opensora_sp.encoders import OpenSoraVAE, OpenSoraVAEv13, T5TextEncoder
from opensora_sp.encoders.loading import FrozenEncoder
from opensora_sp.models import build_model
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.batches import BatchSpec
from opensora_sp.planner.run_plan import plan
from opensora_sp.planner.sampling_memory import EncoderTracer
from opensora_sp.sampling.decoding import decode
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.process_groups import Groups, place_encoders
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import _sample_all

pytestmark = requires_stub
MEMORY = 12e9
TEXT = dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", max_length=300, dtype="bf16")
VAE = dict(type="OpenSoraVAE_V1_2", from_pretrained="hpcai-tech/OpenSora-VAE-v1.2")
VAE_V13 = dict(
    type="OpenSoraVAE_V1_3",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.3",
    micro_batch_size=1,
    micro_batch_size_2d=4,
    micro_frame_size=17,
    normalization="video",
    use_tiled_conv3d=True,
    tile_size=4,
    dtype="bf16",
)


def config(resolution: str) -> InferenceConfig:
    """51 frames, 16:9, in one step."""
    return InferenceConfig(
        num_frames=51,
        resolution=resolution,
        aspect_ratio="9:16",
        vae=VAE,
        text_encoder=TEXT,
        model=dict(type="STDiT3-XL/2", qk_norm=True),
        scheduler=dict(num_sampling_steps=1, use_timestep_transform=True),
        prompts=["a dog runs along a beach"],
        sp_size=1,
        # Values on the stub are none: nothing could be verified.
        kernels="torch",
    )


def on_host(cls: type[FrozenEncoder], options: dict[str, Any]) -> Any:
    """An encoder of the release's sizes in memory that is reserved and never written."""
    values = {key: value for key, value in options.items() if key != "type"}
    encoder = cls.planned(**values)
    encoder.to_empty(device="cpu")
    if isinstance(encoder, T5TextEncoder):
        encoder.t5.tie_weights()
    encoder.offload = values.get("offload", False)
    return encoder.to("cuda")


def on_sampling(resolution: str, memory: float) -> list[int]:
    """A prompt to frames; the frames that came."""
    cfg = config(resolution)
    requests = requests_of(cfg)
    placed = place_encoders(cfg, Groups(1, [[requests]], ""), memory)
    text, vae = on_host(T5TextEncoder, placed.text_encoder), on_host(OpenSoraVAE, placed.vae)
    text.tokenizer = lambda text: [1] * 300
    with torch.device("meta"):
        model = build_model("STDiT3-XL/2", qk_norm=True).to(torch.bfloat16)
    model = model.to_empty(device="cuda").requires_grad_(False).eval()
    pipeline = Pipeline(cfg, model, vae, text, torch.device("cuda"))

    with phase("text"):
        encoded = pipeline.encode(requests)
    # Nothing computes here, and what was never computed may not be finite.
    with (
        phase("steps"),
        patch.object(Tensor, "isfinite", lambda self: torch.ones(1, dtype=torch.bool)),
    ):
        latents = pipeline.latents(requests, text=encoded)
    del encoded
    with phase("decoding"):
        frames = [
            part.shape[0] for _, part in pipeline.frames(requests, [latents], SequenceMesh(1))
        ]
    return frames


@pytest.mark.slow
@pytest.mark.parametrize("resolution", ["240p", "480p"])
def test_the_release_samples_within_12_gb(resolution: str) -> None:
    (estimate,) = plan(config(resolution), 1, memory_gb=MEMORY / 1e9).buckets
    assert estimate.sampling is not None and estimate.sampling.peak < MEMORY
    assert "text encoder on the host, by layers" in estimate.sampling.placement

    # The stub refuses what its memory has no room for.
    recording = run_on_stub(on_sampling, resolution, MEMORY, memory=int(MEMORY), timeout=900)
    assert sum(recording.result) == 51
    for name in ("text", "steps", "decoding"):
        predicted, counted = getattr(estimate.sampling, name), recording.peak(name).allocated
        print(f"{resolution} {name}: {counted / 1e9:.3f} GB, predicted {predicted / 1e9:.3f}")
        assert counted < MEMORY
        assert 0.95 < predicted / counted < 1.05, (name, predicted, counted)


def on_decoding(size: tuple[int, int]) -> int:
    """A chunk of Open-Sora 1.3 to frames; how many came."""
    vae = on_host(OpenSoraVAEv13, VAE_V13)
    latents = torch.zeros(1, vae.channels, *vae.latent_size(17, *size), device="cuda")
    with phase("decoding"):
        mesh = SequenceMesh(1)
        pieces = decode(vae, [latents], num_frames=17, size=size, overlap=0, mesh=mesh)
        return sum(len(part) for _, part in pieces)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(144, 256), (240, 426)])
def test_a_chunk_of_1_3_takes_what_is_predicted(size: tuple[int, int]) -> None:
    tracer = EncoderTracer(BatchSpec(1, 17, size), "cuda")
    cfg: Any = SimpleNamespace(vae=VAE_V13, loop=1)
    traced = tracer.vae(cfg)
    predicted = traced.weights + traced.activations

    recording = run_on_stub(on_decoding, size, memory=int(MEMORY), timeout=900)
    assert recording.result == 17
    counted = recording.peak("decoding").allocated
    print(f"{size}: {counted / 1e9:.3f} GB, predicted {predicted / 1e9:.3f}")
    assert 0.95 < predicted / counted < 1.05, (predicted, counted)


def on_run(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The encoders that a run builds on a device with so little memory."""
    cfg = config("240p").model_copy(update=dict(outputs=folder))
    weights = Path(folder, "model.safetensors")
    weights.write_bytes(b"of a model")
    with (
        patch("opensora_sp.sampling.run.build_pipeline", side_effect=StopIteration) as built,
        pytest.raises(StopIteration),
    ):
        _sample_all(cfg, requests_of(cfg), weights, torch.device("cuda"))
    placed = built.call_args.kwargs["placed"]
    return placed.text_encoder, placed.vae


@pytest.mark.slow
def test_a_run_chooses_by_the_free_memory(tmp_path: Path) -> None:
    recording = run_on_stub(on_run, str(tmp_path), memory=int(MEMORY))
    assert recording.result == (TEXT | dict(offload="layers"), VAE)
    recording = run_on_stub(on_run, str(tmp_path), memory=int(80e9))
    assert recording.result == (TEXT, VAE)
