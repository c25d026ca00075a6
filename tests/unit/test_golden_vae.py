"""The video autoencoder of Open-Sora 1.2 against the reference values of the public release."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import golden_values
import pytest
import torch
from golden_vae import load, saved_pipeline
from golden_values import close_gradient, close_sum, under

from opensora_sp.encoders import independent_pieces, planned_latent_size
from opensora_sp.encoders.open_sora_vae import ChunkVAE, OpenSoraVAE, build_parts
from opensora_sp.encoders.video_vae import CausalConv3d, ResBlock, TemporalVAE

pytestmark = pytest.mark.core
GOLDEN = golden_values.GOLDEN / "video_vae"


close = partial(golden_values.close, floor=3e-5)


def block_cases(name: str) -> list[tuple[dict, dict[str, torch.Tensor]]]:
    about, tensors = load(f"blocks/{name}")
    assert about["cases"]
    return [(case, under(tensors, f"{case['case']}/")) for case in about["cases"]]


def test_causal_convolution() -> None:
    for case, tensors in block_cases("causal_conv3d"):
        given = case["constructor"]
        kernel = given["kernel_size"]
        conv = CausalConv3d(
            given["chan_in"],
            given["chan_out"],
            kernel if isinstance(kernel, int) else tuple(kernel),
            stride=given.get("strides", [1])[0],
            dilation=given.get("dilation", 1),
            bias=given.get("bias", True),
            padding_mode=given.get("pad_mode", "zeros"),
        )
        _, height, width = conv.conv.padding

        assert [width, width, height, height, conv.front, 0] == case["padding_w_h_t"], case["case"]
        conv.load_state_dict(under(tensors, "state/"))
        close(conv(tensors["input/x"]), tensors["output"])


def test_residual_block() -> None:
    for case, tensors in block_cases("res_block"):
        given = case["constructor"]
        kernel = 3 if given.get("use_conv_shortcut") else 1
        block = ResBlock(
            given["in_channels"], given["filters"], given["num_groups"], shortcut_kernel=kernel
        )
        block.load_state_dict(under(tensors, "state/"))
        close(block(tensors["input/x"]), tensors["output"])


@pytest.mark.parametrize("name", ["class_default_layout", "released_layout"])
def test_temporal_autoencoder_and_its_gradients(name: str) -> None:
    about, tensors = load(f"temporal/{name}")
    vae = TemporalVAE(**about["constructor"])
    vae.load_state_dict(under(tensors, "state/"))
    assert sum(p.numel() for p in vae.parameters()) == about["parameters_total"]
    assert vae.time_factor == about["time_downsample_factor"]
    for case in about["cases"]:
        check_clip_length(vae, case, under(tensors, f"{case['case']}/"))


def check_clip_length(vae: TemporalVAE, case: dict, tensors: dict[str, torch.Tensor]) -> None:
    num_frames = case["num_frames"]
    x, z = tensors["input/x"].requires_grad_(), tensors["input/z"].requires_grad_()
    moments = vae.moments(x)
    mean = vae.encode(x)
    assert mean.shape[2] == case["latent_frames"]
    close(mean, tensors["mean"])
    decoded = vae.decode(z, num_frames=num_frames)
    close(decoded, tensors["decoded"])
    (gradient,) = torch.autograd.grad((decoded * tensors["probe_decoded"]).sum(), z)
    close_gradient(gradient, tensors["grad_decoded/input_z"], floor=3e-5, name="input_z")

    vae.zero_grad()
    assert not case["logvar_clamped"]
    close(moments, tensors["moments"])
    mean = moments.chunk(2, dim=1)[0]
    reconstruction = vae.decode(mean, num_frames=num_frames)
    close(reconstruction, tensors["reconstruction"])
    loss = (reconstruction * tensors["probe_reconstruction"]).sum() + (
        moments * tensors["probe_moments"]
    ).sum()
    close_sum(loss, tensors["loss"], bound=2e-3)
    loss.backward()
    wanted = under(tensors, "grad/")
    close_gradient(x.grad, wanted.pop("input_x"), floor=3e-5, name="input_x")
    assert wanted
    for parameter, gradient in wanted.items():
        close_gradient(vae.get_parameter(parameter).grad, gradient, name=parameter)


@pytest.fixture(scope="module")
def pipeline() -> tuple[dict, dict[str, torch.Tensor]]:
    return load("pipeline/chunked")


@pytest.mark.parametrize("index", range(6))
def test_chunked_pipeline(index: int, pipeline: tuple, tmp_path: Path) -> None:
    about, all_tensors = pipeline
    assert len(about["cases"]) == 6
    case = about["cases"][index]
    folder = saved_pipeline(tmp_path, about, all_tensors, case)
    sizes = {
        "micro_frame_size": case["micro_frame_size"],
        "micro_batch_size": case["micro_batch_size"],
    }
    vae = OpenSoraVAE(str(folder), **sizes)
    tensors = under(all_tensors, f"{case['case']}/")
    video, num_frames = tensors["input/x"], case["frames"]

    latents = vae.encode(video)
    close(latents, tensors["latent"])
    close(latents * vae.scale + vae.shift, tensors["latent_unnormalised"])
    close(vae.chunk_vae.spatial_vae.encode(video), tensors["spatial_latent"])
    close(vae.decode(tensors["latent"], num_frames=num_frames), tensors["decoded"])
    if "input/z" in tensors:
        close(vae.decode(tensors["input/z"], num_frames=num_frames), tensors["decoded_from_z"])

    assert (
        list(vae.latent_size(*video.shape[2:]))
        == case["get_latent_size"]
        == list(latents.shape[2:])
    )
    assert vae.chunk_latent_frames == case["micro_z_frame_size"]
    pieces = independent_pieces(vae, num_frames=num_frames, latent_frames=latents.shape[2])
    assert [piece.frames.stop - piece.frames.start for piece in pieces] == case["chunk_frames"]
    decoded = [
        vae.chunk_vae.temporal_vae.decode(
            tensors["latent_unnormalised"][:, :, piece.latents], num_frames=length
        )
        for piece, length in zip(pieces, case["chunk_frames"], strict=True)
    ]
    close(torch.cat(decoded, dim=2), tensors["decoded_spatial_latent"])


def test_frame_counts_that_do_not_fit_are_refused(pipeline: tuple, tmp_path: Path) -> None:
    """The release returns another number of frames there."""
    about, tensors = pipeline
    vae = OpenSoraVAE(str(saved_pipeline(tmp_path, about, tensors, about["cases"][0])))
    for other in about["decode_with_other_frame_counts"]:
        latents, asked = (
            torch.zeros(1, 4, other["latent_frames"], 2, 2),
            other["num_frames_argument"],
        )
        released = other["result_shape_or_error"]

        if released[2] == asked:
            assert list(vae.decode(latents, num_frames=asked).shape) == released
        else:
            with pytest.raises(ValueError, match=f"got {other['latent_frames']} latent frames to"):
                vae.decode(latents, num_frames=asked)


def test_latent_sizes() -> None:
    for table in json.loads((GOLDEN / "data" / "latent_sizes.json").read_text())["table"]:
        size, micro = (table["height"], table["width"]), table["micro_frame_size"]
        for frames, expected in table["rows_frames_then_latent_size"]:
            # The release leaves unknown sizes unknown; here all are known.
            known = [1 if side is None else side for side in (frames, *size)]
            found = OpenSoraVAE.planned_latent_size(*known, micro_frame_size=micro)
            assert [None if e is None else f for e, f in zip(expected, found)] == expected

    about = json.loads((GOLDEN.parent / "data" / "video_vae_v12_latent_sizes.json").read_text())
    for micro, tables in about["by_micro_frame_size"].items():
        micro_frame_size = None if micro == "None" else int(micro)
        vae = {
            "type": "OpenSoraVAE_V1_2",
            "from_pretrained": "x",
            "micro_frame_size": micro_frame_size,
        }
        for height, width, rows in tables["table"]:
            for frames, *expected in rows:
                assert list(planned_latent_size(vae, frames, height, width)) == expected

    vae = {"type": "VideoAutoencoderKL", "from_pretrained": "x"}
    for frames, height, width, expected in about["image_vae_same_release"]:
        assert list(planned_latent_size(vae, frames, height, width)) == expected


def test_latent_sizes_of_the_image_autoencoder_of_version_1_0() -> None:
    about = json.loads((GOLDEN.parent / "data" / "image_vae_v10_latent_sizes.json").read_text())
    vae = {"type": "VideoAutoencoderKL", "from_pretrained": "x", "round_down": False}
    for frames, height, width, expected in about["rows"]:
        if expected == "rejected":
            with pytest.raises(
                ValueError, match=f"got frames of {height}x{width} .*; take {height}x424, or set"
            ):
                planned_latent_size(vae, frames, height, width)
        else:
            assert list(planned_latent_size(vae, frames, height, width)) == expected


def test_the_full_size_has_the_released_names_and_shapes() -> None:
    about = json.loads(
        gzip.decompress((GOLDEN / "params" / "opensora-vae-v12.json.gz").read_bytes())
    )
    released = {  # its config.json, as far as it matters
        "vae_2d": {
            "type": "VideoAutoencoderKL",
            "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
        },
        "vae_temporal": {"type": "VAE_Temporal_SD", "from_pretrained": None},
    }
    with torch.device("meta"):
        vae = ChunkVAE(*build_parts(released, "nowhere"), micro_batch_size=4)
    ours = {name: list(tensor.shape) for name, tensor in vae.state_dict().items()}

    assert ours == dict(about["state_dict"]) and len(ours) == about["state_dict_entries"]
    assert sum(p.numel() for p in vae.parameters()) == about["parameters_total"]
    for prefix, count in about["parameters_by_prefix"].items():
        assert (
            sum(p.numel() for name, p in vae.named_parameters() if name.startswith(prefix)) == count
        )
