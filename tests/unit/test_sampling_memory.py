"""Memory of sampling: predicted against live bytes, and which weights wait on the host."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from random_weights import draw_weights

from opensora_sp.config import InferenceConfig
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.encoders import LATENT_ENCODERS
from opensora_sp.encoders.huggingface import ImageVAE
from opensora_sp.encoders.loading import weight_bytes
from opensora_sp.encoders.t5 import T5TextEncoder
from opensora_sp.models import build_model
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.live_peak import LivePeak
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import plan
from opensora_sp.planner.sampling_memory import (
    FREE_SHARE,
    EncoderTracer,
    placed,
    placements,
    sampling_memory,
)
from opensora_sp.sampling.decoding import decode
from opensora_sp.sampling.group_choice import Groups, place_encoders
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of

MODEL = dict(
    in_channels=4, caption_channels=32, model_max_length=40, hidden_size=48, depth=2, num_heads=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configurations of a small T5 and a small autoencoder, of which plans need no weights."""
    from diffusers import AutoencoderKL
    from transformers import T5Config

    folder = tmp_path_factory.mktemp("encoders")
    sizes = dict(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=4, num_heads=4)
    T5Config(**sizes).save_pretrained(folder / "t5")
    with torch.device("meta"):
        vae = AutoencoderKL(
            block_out_channels=(48, 64),
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )
    vae.save_config(folder / "vae")
    return folder


def config(folder: Path, **changes: Any) -> InferenceConfig:
    text = dict(type="t5", from_pretrained=str(folder / "t5"), max_length=40)
    vae = dict(type="VideoAutoencoderKL", from_pretrained=str(folder / "vae"), micro_batch_size=4)
    return InferenceConfig(
        num_frames=8,
        image_size=(96, 96),
        precision="fp32",
        vae=vae | changes.pop("vae", {}),
        text_encoder=text | changes.pop("text_encoder", {}),
        model=dict(type="STDiT3", **MODEL),
        scheduler=changes.pop("scheduler", dict(num_sampling_steps=1)),
        prompts=["a dog"],
        **changes,
    )


def built(cls: Any, options: dict[str, Any]) -> Any:
    """An encoder with weights drawn at random, without files of them."""
    encoder = cls.planned(**{key: value for key, value in options.items() if key != "type"})
    encoder.to_empty(device="cpu")
    if isinstance(encoder, T5TextEncoder):
        encoder.t5.tie_weights()
    return draw_weights(encoder).to("cpu")


SIZES = {name: MODEL[name] for name in ("in_channels", "hidden_size", "depth", "num_heads")}
CURVE = dict(model=dict(type="STDiT3", **SIZES), path=[0, 1], polynomial=[1, 0])
# The middle one of three steps reuses the residual.
CACHED = dict(num_sampling_steps=3, cache_threshold=0.5, cache_curve=CURVE)


@pytest.mark.parametrize("scheduler", [dict(num_sampling_steps=1), CACHED])
def test_live_bytes_of_each_phase_are_those_predicted(
    folder: Path, scheduler: dict[str, Any]
) -> None:
    cfg = config(folder, vae=dict(micro_batch_size=3), scheduler=scheduler)
    (estimate,) = plan(cfg, 1, device="cpu").buckets
    assert estimate.sampling is not None

    text, vae = built(T5TextEncoder, cfg.text_encoder), built(ImageVAE, cfg.vae)
    text.tokenizer = lambda text: [1] * 40
    model = draw_weights(build_model("STDiT3", **MODEL)).requires_grad_(False).eval()
    pipeline = Pipeline(cfg, model, vae, text, torch.device("cpu"))
    requests, counted = requests_of(cfg), dict[str, int]()

    weights = sum(weight_bytes(module) for module in (text, vae, model))
    with LivePeak() as live:
        text.encode(["a dog"])
        counted["text"], _ = live.peak, live.reset_peak()
        encoded = pipeline.encode(requests)
        live.reset_peak()
        latents = pipeline.latents(requests, text=encoded)
        counted["steps"] = live.peak
        del encoded
        live.reset_peak()
        frames = sum(len(part) for _, part in pipeline.frames(requests, [latents], SequenceMesh(1)))
        counted["decoding"] = live.peak

    assert frames == 8
    for name, peak in counted.items():
        predicted = getattr(estimate.sampling, name) - weights
        print(f"{name}: {peak:,} bytes beside {weights:,} of weights, predicted {predicted:,}")
        assert 0.95 < predicted / peak < 1.05, name


def video_autoencoders(folder: Path) -> dict[str, dict[str, Any]]:
    """Configs of small autoencoders for videos, with the options that bound their memory."""
    image = dict(json.loads((folder / "vae" / "config.json").read_text()), latent_channels=4)
    image |= dict(block_out_channels=[16, 16, 32, 32])
    for kind in ("down", "up"):
        (block,) = set(image[f"{kind}_block_types"])
        image[f"{kind}_block_types"] = [block] * 4
    temporal = dict(type="VAE_Temporal", filters=16, num_res_blocks=1, num_groups=4)
    parts = dict(ch=32, ch_mult=[1, 1, 2, 2], num_res_blocks=1)
    v12, v13 = folder / "v12", folder / "v13"
    files = {
        v12: dict(vae_2d=dict(from_pretrained=str(v12 / "image")), vae_temporal=temporal),
        v12 / "image": image,
        v13: dict(encoder=parts, decoder=parts),
    }
    for place, values in files.items():
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(values))

    chunked = dict(micro_frame_size=5, micro_batch_size=1)
    tiled = dict(micro_batch_size_2d=1, use_tiled_conv3d=True, tile_size=16)
    return {
        "1.2": dict(type="OpenSoraVAE_V1_2", from_pretrained=str(v12), **chunked),
        "1.3": dict(type="OpenSoraVAE_V1_3", from_pretrained=str(v13), **chunked),
        "1.3, tiled": dict(type="OpenSoraVAE_V1_3", from_pretrained=str(v13), **chunked, **tiled),
    }


@pytest.mark.parametrize(
    "name", ["1.2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1.3", "1.3, tiled"))]
)
def test_memory_of_a_chunk_is_predicted_for_any_size(folder: Path, name: str) -> None:
    """No option bounds it for large frames, so that plans have to know how it grows."""
    options = video_autoencoders(folder)[name]
    cls = LATENT_ENCODERS[options["type"]]
    vae, peaks = built(cls, options), []
    for size in ((32, 48), (48, 72)):
        cfg = config(folder).model_copy(
            update=dict(
                vae=options,
                text_encoder=dict(type="HashedBagOfWords", width=32, max_length=40),
                model=dict(type="STDiT3", **MODEL | dict(in_channels=vae.channels)),
                num_frames=10,
                image_size=size,
            )
        )
        (estimate,) = plan(cfg, 1, device="cpu").buckets
        assert estimate.sampling is not None
        weights = estimate.memory.kept.total + weight_bytes(vae)
        predicted = estimate.sampling.decoding - weights

        with LivePeak() as live:
            latents = torch.zeros(1, vae.channels, *vae.latent_size(10, *size))
            pieces = decode(
                vae, [latents], num_frames=10, size=size, overlap=0, mesh=SequenceMesh(1)
            )
            assert sum(len(part) for _, part in pieces) == 10
        decoding = live.peak
        print(f"{name}, {size}: {decoding:,} bytes, predicted {predicted:,}")
        assert 0.95 < predicted / decoding < 1.05

        # References are encoded before that, and add no peak.
        with LivePeak() as live:
            vae.encode(torch.zeros(1, 3, 10, *size))
        assert live.peak < decoding
        peaks.append(decoding / (size[0] * size[1]))
    # In proportion to the pixels of a frame.
    assert max(peaks) < 1.1 * min(peaks)


def test_less_stays_on_the_device_the_less_memory_is_free(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def described(**changes: Any) -> list[dict[str, Any]]:
        keys = ("offload", "micro_batch_size")
        return [
            {"text": one.text_encoder.get("offload")} | {key: one.vae.get(key) for key in keys}
            for one in placements(config(folder, **changes))
        ]

    everything = dict(text=None, offload=None, micro_batch_size=4)
    streamed = everything | dict(text="layers")
    offloaded = streamed | dict(offload=True)
    by_frame = offloaded | dict(micro_batch_size=1)
    assert described() == [everything, streamed, offloaded, by_frame]
    # What a config says stays.
    own = dict(text_encoder=dict(offload=False), vae=dict(offload=False, micro_batch_size=1))
    assert described(**own) == [dict(text=False, offload=False, micro_batch_size=1)]

    cfg = config(folder)
    run = RunEstimator(cfg, 1)
    spec = BatchSpec(1, 8, (96, 96))
    memory = run.memory_of(run.latents(spec), 1)
    candidates = [*placements(cfg)]
    tracer = EncoderTracer(run, spec)
    peaks = [sampling_memory(one, tracer, memory).peak for one in candidates]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1] > peaks[3]
    for peak in (peaks[0], peaks[3]):
        # Of several that take as much, the first.
        one = candidates[peaks.index(peak)]
        run.memory = (peak + 1) / FREE_SHARE
        chosen, estimate = placed(run, spec, memory)
        assert (chosen.vae, chosen.text_encoder) == (one.vae, one.text_encoder)
        assert estimate.peak == peak

    groups = Groups(1, [[requests_of(cfg)]], "")
    with caplog.at_level(logging.INFO, logger="opensora_sp"):
        assert place_encoders(cfg, groups, peaks[-1] / FREE_SHARE + 1).vae == candidates[-1].vae
    (line,) = [record for record in caplog.records if record.name.startswith("opensora_sp")]
    assert "GB free: text encoder on the host, by layers, autoencoder on" in line.getMessage()

    place_encoders(cfg, groups, peaks[-1] / 2)
    assert "of free GPU memory; expected " in caplog.text and "8 frames, 96x96" in caplog.text


def test_a_streamed_layer_has_its_weights_in_its_own_call_alone(folder: Path) -> None:
    """Torch's device without storage stands for a GPU."""
    options = config(folder).text_encoder
    text = built(T5TextEncoder, options)
    text.offload = "layers"
    text.to("meta")
    layers, seen = list(text.t5.encoder.block), list[list[bool]]()
    assert text.streamed_layers == layers
    for layer in layers:
        layer.layer[0].register_forward_pre_hook(
            lambda *_: seen.append([next(one.parameters()).is_meta for one in layers])
        )

    ids = torch.ones(1, 40, dtype=torch.int64, device="meta")
    before = {name: tensor.clone() for name, tensor in text.state_dict().items()}
    for _ in range(2):
        assert text.features(ids, ids).device.type == "meta"
    assert seen == [[i == j for j in range(4)] for i in range(4)] * 2

    def fail(*_: Any) -> None:
        raise RuntimeError("lost")

    layers[1].layer[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        text.features(ids, ids)
    after = text.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
