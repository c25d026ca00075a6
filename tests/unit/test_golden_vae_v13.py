"""The video autoencoder of Open-Sora 1.3 against the reference values of the public release."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_values
import numpy as np
import pytest
import torch
from golden_values import GOLDEN, close_gradient, close_sum, under
from safetensors.torch import save_file

from opensora_sp.data.transforms import to_frames
from opensora_sp.encoders import (
    independent_pieces,
    planned_decoded_frames,
    planned_latent_size,
    planned_whole_frames,
)
from opensora_sp.encoders.open_sora_vae_v13 import OpenSoraVAEv13, build_network
from opensora_sp.encoders.space_time_vae import (
    CausalAttention,
    FrameStep,
    TiledConv3d,
    VideoDownsample,
    VideoUpsample,
    tile_convolutions,
)
from opensora_sp.encoders.video_vae import CausalConv3d
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.live_peak import LivePeak
from opensora_sp.sampling.decoding import decode
from opensora_sp.sampling.prompts import parse_prompt
from opensora_sp.sampling.requests import Request, check_requests

pytestmark = pytest.mark.core
load = partial(golden_values.load, "v13")
close = partial(golden_values.close, floor=3e-5)
OPTIONS = ("micro_batch_size", "micro_frame_size", "temporal_overlap", "micro_batch_size_2d")


def block_cases(name: str) -> list[tuple[dict, dict[str, torch.Tensor]]]:
    about, tensors = load(name)
    assert about["cases"]
    return [(case, under(tensors, f"{case['case']}/")) for case in about["cases"]]


def check_block(block: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    block.load_state_dict({k: v.float() for k, v in under(tensors, "state/").items()})
    x = tensors["input/x"].requires_grad_()
    out = block(x)
    close(out, tensors["output"])
    if "probe" in tensors:
        (gradient,) = torch.autograd.grad((out * tensors["probe"]).sum(), x)
        close_gradient(gradient, tensors["grad/input_x"], floor=1e-6)


def test_causal_convolution() -> None:
    for case, tensors in block_cases("causal_conv3d"):
        given = case["constructor"]
        kernel, stride = given["kernel_size"], given.get("stride", 1)
        time, space = (stride, 1) if isinstance(stride, int) else (stride[0], stride[1])
        depth = kernel if isinstance(kernel, int) else kernel[0]
        conv = CausalConv3d(
            given["chan_in"],
            given["chan_out"],
            kernel if isinstance(kernel, int) else tuple(kernel),
            stride=time,
            spatial_stride=space,
            front=depth - 1,
        )
        check_block(conv, tensors)


def test_attention_sees_no_later_token() -> None:
    for case, tensors in block_cases("attention"):
        check_block(CausalAttention(case["constructor"]["in_channels"]), tensors)


def test_steps_between_sizes() -> None:
    for case, tensors in block_cases("downsample"):
        given = case["constructor"]
        in_time = "stride" in given
        step = VideoDownsample(3) if in_time else FrameStep(3, halves=True)
        step.micro_batch_size = given.get("micro_batch_size_2d")
        check_block(step, tensors)
    for case, tensors in block_cases("upsample"):
        in_time = case["case"].startswith("video")
        step = VideoUpsample(32) if in_time else FrameStep(3, halves=False)
        step.micro_batch_size = 4
        check_block(step, tensors)


def test_tiled_convolution() -> None:
    for case, tensors in block_cases("tiled_conv3d"):
        given = case["conv"]
        conv = torch.nn.Conv3d(given["in_channels"], given["out_channels"], given["kernel_size"])
        model = torch.nn.Sequential(conv)
        tile_convolutions(model, case["tiling"]["tile_size"])
        assert isinstance(model[0], TiledConv3d)
        check_block(conv, tensors)


@pytest.mark.parametrize("tile_size", [1, 4, 5, 16, 100])
def test_tiles_of_any_length_and_padding_give_the_whole_convolution(tile_size: int) -> None:
    conv = torch.nn.Conv3d(2, 3, (3, 3, 1), padding=(0, 1, 0)).double()
    x = torch.randn(1, 2, 3, 5, 13, dtype=torch.float64)
    whole = conv(x), conv(x.mT)
    tile_convolutions(torch.nn.Sequential(conv), tile_size)
    for ours, theirs in zip((conv(x), conv(x.mT)), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def golden() -> tuple[dict, dict[str, torch.Tensor]]:
    return load("autoencoder")


@pytest.fixture(scope="module")
def folder(golden: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    about, tensors = golden
    folder = tmp_path_factory.mktemp("vae")
    sizes = {part: about[f"{part}_constructor"] for part in ("encoder", "decoder")}
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file(under(tensors, "state/"), folder / "model.safetensors")
    return folder


def test_network_and_its_gradients(golden: tuple, folder: Path) -> None:
    about, tensors = golden
    vae = OpenSoraVAEv13(str(folder)).vae.requires_grad_(True)
    assert sum(p.numel() for p in vae.parameters()) == about["parameters_total"]
    (case,) = about["cases"]
    one = under(tensors, f"{case['case']}/")

    x, z = one["input/x"].requires_grad_(), one["input/z"].requires_grad_()
    close(vae.encode(x), one["mean"])
    decoded = vae.decode(z)
    close(decoded, one["decoded"])
    (gradient,) = torch.autograd.grad((decoded * one["probe_decoded"]).sum(), z)
    close_gradient(gradient, one["grad_decoded/input_z"], floor=3e-5)

    moments = vae.encoder(x)
    close(moments, one["moments"])
    reconstruction = vae.decode(moments.chunk(2, dim=1)[0])
    golden_values.close(reconstruction, one["reconstruction"], floor=1e-4)
    loss = (reconstruction * one["probe_reconstruction"]).sum()
    loss = loss + (moments * one["probe_moments"]).sum()
    close_sum(loss, one["loss"], bound=2e-3)
    loss.backward()
    close_gradient(x.grad, one["grad/input_x"], floor=1e-3)
    parameters = dict(vae.named_parameters())
    for name in about["gradient_parameters"]:
        close_gradient(parameters[name].grad, one[f"grad/{name}"], name=name)


def case_names() -> list[Any]:
    """One with overlap is fast, the others are slow."""
    first, *others = sorted(case["case"] for case in load("autoencoder")[0]["chunked_cases"])
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", case_names())
def test_clips_in_chunks(name: str, golden: tuple, folder: Path) -> None:
    about, tensors = golden
    (case,) = (one for one in about["chunked_cases"] if one["case"] == name)
    options = case["pipeline_constructor"]
    vae, one = OpenSoraVAEv13(str(folder), **options), under(tensors, f"{name}/")
    chunking = {key: options[key] for key in OPTIONS if key in options}
    config = {"type": "OpenSoraVAE_V1_3", "from_pretrained": "nowhere", **chunking}

    x, frames = one["input/x"], case["decoded_shape"][2]
    latents = vae.encode(x)
    close(latents, one["latent"])
    close(vae.decode(one["latent"], num_frames=frames), one["decoded"])

    assert vae.latent_size(*x.shape[2:]) == tuple(latents.shape[2:])
    assert planned_latent_size(config, *x.shape[2:]) == tuple(latents.shape[2:])
    assert planned_decoded_frames(config, x.shape[2]) == frames
    assert vae.decoded_frames(latents.shape[2]) == frames
    with pytest.raises(ValueError, match=f"latent frames to decode to {frames + 1} frames"):
        vae.decode(latents, num_frames=frames + 1)


@pytest.mark.parametrize("tiled", [False, True])
def test_independent_pieces_are_those_of_the_whole(
    tiled: bool, golden: tuple, folder: Path
) -> None:
    """Chunks stand alone; those that share a frame but for this one, whose mean the whole has."""
    _, tensors = golden
    options = dict(micro_batch_size=1, micro_frame_size=5, use_tiled_conv3d=tiled, tile_size=4)
    for overlaps, frames in ((False, 10), (True, 9)):
        vae = OpenSoraVAEv13(
            str(folder), normalization="video", temporal_overlap=overlaps, **options
        )
        x = tensors["plain5_clip10_batch2/input/x"][:1, :, :frames]
        z = vae.encode(x)
        decoded = vae.decode(z, num_frames=frames)
        pieces = independent_pieces(vae, num_frames=frames, latent_frames=z.shape[2])
        assert len(pieces) == 2
        own = []
        for piece in pieces:
            assert torch.equal(vae.encode(x[:, :, piece.frames]), z[:, :, piece.latents])
            own.append(vae.decode(z[:, :, piece.latents], num_frames=5))

        if overlaps:
            shared = (own[0][:, :, -1:] + own[1][:, :, :1]) / 2
            own = [own[0][:, :, :-1], shared, own[1][:, :, 1:]]
        assert torch.equal(torch.cat(own, dim=2), decoded)

    whole = OpenSoraVAEv13(str(folder), **options, normalization="video_5frames")
    assert len(independent_pieces(whole, num_frames=9, latent_frames=4)) == 1


def test_memory_of_decoding_is_that_of_a_chunk(folder: Path) -> None:
    """Counted where sampling decodes, with the overlap, tiles and statistics of the release."""
    vae = OpenSoraVAEv13(
        str(folder),
        normalization="video",
        micro_batch_size=1,
        micro_batch_size_2d=4,
        micro_frame_size=5,
        temporal_overlap=True,
        use_tiled_conv3d=True,
        tile_size=4,
    )

    def peak(num_frames: int) -> int:
        size = vae.latent_size(num_frames, 16, 16)
        z = torch.randn(1, 16, *size, generator=torch.Generator().manual_seed(0))
        whole = to_frames(vae.decode(z, num_frames=num_frames)[0])
        pieces = partial(
            decode, vae, [z], num_frames=num_frames, size=(16, 16), overlap=1, mesh=SequenceMesh(1)
        )
        assert np.array_equal(np.concatenate([part for _, part in pieces()]), whole)

        with LivePeak() as live:
            done = sum(len(part) for _, part in pieces())
        assert done == num_frames
        return live.peak

    # Three chunks, and six.
    assert 0 < peak(13) == peak(25)


def test_sizes_of_latents_are_those_of_the_release_for_whole_chunks() -> None:
    """``get_latent_size`` ignores left-over frames, which the encoder does not."""
    compared = 0
    for entry in json.loads((GOLDEN / "v13/latent_sizes.json").read_text())["table"]:
        options = {k: entry[k] for k in ("micro_frame_size", "temporal_overlap") if k in entry}
        config = {"type": "OpenSoraVAE_V1_3", "micro_batch_size": 1, **options}
        if entry["height"] is None:
            continue
        for frames, size in entry["rows_frames_then_latent_size"]:
            if frames and planned_whole_frames(config, frames) == frames:
                found = planned_latent_size(config, frames, entry["height"], entry["width"])
                assert found == tuple(size), (options, frames)
                assert planned_decoded_frames(config, frames) == frames
                compared += 1
    assert compared > 50


def test_frames_that_statistics_do_not_fit_are_refused_before_loading() -> None:
    """Statistics of 5 latent frames: 49 frames in chunks of 17 are 5 + 5 + 4."""
    chunked = dict(type="OpenSoraVAE_V1_3", micro_batch_size=1, micro_frame_size=17)
    config = {**chunked, "normalization": "video_5frames"}
    for frames, latents in {1: 1, 17: 5, 34: 10, 51: 15}.items():
        assert planned_latent_size(config, frames, 16, 16) == (latents, 2, 2)
    for frames, latents in {13: 4, 18: 6, 49: 14}.items():
        message = f"got {latents} latent frames with vae.normalization 'video_5frames'; expected 1"
        with pytest.raises(ValueError, match=message):
            planned_latent_size(config, frames, 16, 16)
    assert planned_latent_size({**config, "temporal_overlap": True}, 49, 16, 16) == (15, 2, 2)


def test_loops_may_share_frames_that_statistics_do_not_fit() -> None:
    """Two loops of 51 frames, 15 latent ones, share 5 of them: the first 17 frames."""
    starts: list[int] = []
    files = SimpleNamespace(names=(), read=lambda inputs, shape, start: starts.append(start) or {})
    vae: dict[str, Any] = dict(type="OpenSoraVAE_V1_3", micro_batch_size=1, micro_frame_size=17)
    vae["normalization"] = "video_5frames"
    spec = SimpleNamespace(input_size=None, model_class=SimpleNamespace(extra_inputs={}))
    cfg: Any = SimpleNamespace(
        vae=vae,
        model_spec=spec,
        loop=2,
        condition_frame_length=5,
        cond_type=None,
        extra_files=files,
        format="mp4",
        scheduler=dict(type="rflow"),
    )
    prompt = parse_prompt("a fox", None, None)
    request = Request(prompt=prompt, num_frames=51, size=(16, 16), fps=24.0, seed=0)
    check_requests(cfg, [request])
    assert starts == [0, 51 - 17]

    cfg.extra_files = None
    check_requests(cfg, [request])


def test_references_are_cut_as_by_the_release() -> None:
    table = json.loads((GOLDEN / "v13/conditioning.json").read_text())["reference_length"]
    for size, overlap, frames, kept in table["rows"]:
        config = {"type": "OpenSoraVAE_V1_3", "micro_batch_size": 1, "micro_frame_size": size}
        # Where no chunk is whole, one frame is kept, which is encoded as an image.
        wanted = max(1, kept)
        found = planned_whole_frames({**config, "temporal_overlap": overlap}, frames)
        assert found == wanted, (size, overlap, frames)


def test_full_size_has_the_names_and_shapes_of_the_release() -> None:
    path = GOLDEN / "v13/params_autoencoder.json.gz"
    about = json.loads(gzip.decompress(path.read_bytes()))
    with torch.device("meta"):
        vae = build_network({}, 16, "here")
    assert sum(p.numel() for p in vae.parameters()) == about["parameters_total"]
    found = [[name, list(tensor.shape)] for name, tensor in vae.state_dict().items()]
    assert sorted(found) == sorted(about["state_dict"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"micro_frame_size": 16}, "got vae.micro_frame_size 16; expected 1 more than a multiple of 4"),
    ({"temporal_overlap": True}, "got vae.temporal_overlap without vae.micro_frame_size"),
    ({"temporal_overlap": True, "micro_frame_size": 1}, "got vae.micro_frame_size 1; expected"),
    ({"normalization": "video", "z_channels": 4}, "'video' with z_channels 4; expected 16"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_do_not_fit_are_refused_before_loading(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned_latent_size({"type": "OpenSoraVAE_V1_3", **options}, 17, 64, 64)


def test_weights_of_another_autoencoder_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({"encoder.conv_in.conv.bias": torch.zeros(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="got weights of another autoencoder in"):
        OpenSoraVAEv13(str(tmp_path))
    (tmp_path / "config.json").write_text('{"decoder": {"temporal_up_layers": [3]}}')
    with pytest.raises(ValueError, match="with 2 frames and 8 pixels to a latent position"):
        OpenSoraVAEv13(str(tmp_path))
    vae = OpenSoraVAEv13(str(folder), normalization="video_5frames")
    with pytest.raises(ValueError, match="got 2 latent frames with vae.normalization"):
        vae.encode(torch.zeros(1, 3, 5, 16, 16))
