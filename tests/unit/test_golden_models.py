"""STDiT, STDiT2, STDiT3 and their parts against the reference values of the public releases."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
import torch
from golden_models import (
    CASES,
    block_cases,
    built,
    check_output_and_gradients,
    inputs_of,
    with_state,
)
from golden_values import GOLDEN, close, close_table, load, under
from tiny_models import TINY

from opensora_sp.models import PatchGrid, build_model
from opensora_sp.models.blocks import FinalLayer, STDiT3Block
from opensora_sp.models.conditions import Conditioning, Text
from opensora_sp.models.layers import (
    CaptionEmbedder,
    CrossAttention,
    PatchEmbed3D,
    RMSNorm,
    SelfAttention,
    SizeEmbedder,
    TimestepEmbedder,
)
from opensora_sp.models.positions import (
    PositionEmbedding2D,
    RotaryEmbedding,
    frame_position_embedding,
    position_embedding,
)
from opensora_sp.models.stdit_config import SharedConfig, STDiT3Config
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_output_and_gradients(name: str, checkpointing: bool) -> None:
    check_output_and_gradients(name, checkpointing=checkpointing)


@pytest.mark.parametrize("name", CASES)
def test_alternates(name: str) -> None:
    about, tensors = load("models", name)
    for key, alternate in about["alternates"].items():
        overrides = dict(alternate["config_overrides"])
        is_projected = overrides.pop("skip_y_embedder", False)
        model = built(about, tensors, **overrides)
        inputs = {
            k: v
            for k, v in inputs_of(tensors).items()
            if k not in alternate["arguments_not_passed"]
        }
        inputs.update(under(tensors, f"alt/{key}/input/"))
        if is_projected:
            # The release takes the tokens of captions and their lengths, [1, N, C] and [B].
            inputs["y"] = Text(inputs["y"][0], inputs.pop("mask").tolist())
        close(model(**inputs), tensors[f"alt/{key}/output"])


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("stdit-xl-2_v100", "STDiT-XL/2"),
        ("stdit-xl-2_v100_inputsize-16x32x32", "STDiT-XL/2"),
        ("stdit-xl-2_v120", "STDiT-XL/2"),
        ("stdit2-xl-2_v110", "STDiT2-XL/2"),
        ("stdit2-xl-2_v110_qknorm-True_modelmaxlength-200", "STDiT2-XL/2"),
        ("stdit2-xl-2_v120", "STDiT2-XL/2"),
        ("stdit3-xl-2_v120", "STDiT3-XL/2"),
        ("stdit3-3b-2_v120", "STDiT3-3B/2"),
        ("stdit3-xl-2_v120_qknorm-False", "STDiT3-XL/2"),
        ("stdit3-3b-2_v13", "STDiT3-3B/2"),
        ("stdit3-xl-2_v13_kernelsize-8x8x-1_usespatialrope-True", "STDiT3-XL/2"),
    ],
)
def test_presets_have_the_released_names_and_shapes(file: str, preset: str) -> None:
    about = json.loads(gzip.decompress((GOLDEN / "params" / f"{file}.json.gz").read_bytes()))
    of_release = dict(use_cond=True, in_channels=16) if about["upstream_release"] == "v1.3" else {}
    with torch.device("meta"):
        model = build_model(preset, **of_release, **about["constructor_overrides"])
    ours = [[name, list(tensor.shape)] for name, tensor in model.state_dict().items()]
    if preset.startswith("STDiT3"):  # whose entries are in another order here
        ours, about["state_dict"] = sorted(ours), sorted(about["state_dict"])

    assert ours == about["state_dict"]
    assert sum(p.numel() for p in model.parameters()) == about["parameters_total"]
    assert (
        sum(p.numel() for p in model.parameters() if p.requires_grad)
        == about["parameters_trainable"]
    )
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == about[
        "frozen_parameters"
    ]


def conditioned(
    tensors: dict[str, torch.Tensor],
    layout: str,
    T: int,
    S: int,
    width: int,
    text=None,
    lengths=None,
):
    """The conditions of all rows of a batch of B samples with T frames of S patches."""
    t = tensors["input/t"]
    states = (
        [t]
        if "input/t0" not in tensors or "input/x_mask" not in tensors
        else [t, tensors["input/t0"]]
    )
    modulation = torch.stack([s.view(len(t), -1, width) for s in states], dim=1)
    grid = PatchGrid(num_samples=len(t), latent_size=(T, 1, S), patch_size=(1, 1, 1))
    given = ~tensors["input/x_mask"] if "input/x_mask" in tensors else None
    lengths = [0] * len(t) if lengths is None else lengths  # the final layer attends to no text
    conditioning = Conditioning(modulation, given, Text(text, lengths))
    return conditioning.of(TEMPORAL, grid.rows(layout)), modulation


def test_stdit3_block() -> None:
    for case, tensors in block_cases("stdit3_block"):
        T, S, width = case["T"], case["S"], case["hidden"]
        config = STDiT3Config(
            hidden_size=width, num_heads=case["heads"], mlp_ratio=case["mlp_ratio"]
        )
        rope = RotaryEmbedding(width // case["heads"]) if case["temporal"] else None
        block = with_state(STDiT3Block(config, rope=rope), tensors)
        lengths = tensors["input/lengths"].tolist()
        layout = TEMPORAL if case["temporal"] else SPATIAL
        text = tensors["input/y"][0]
        condition, modulation = conditioned(tensors, layout, T, S, width, text, lengths)
        x = tensors["input/x"].view(2, T, S, width)
        rows = x.transpose(1, 2) if case["temporal"] else x
        for table in (block.scale_shift_table + modulation, None):
            out = block(rows.flatten(0, 1), condition, table, None).view(rows.shape)
            out = (out.transpose(1, 2) if case["temporal"] else out).flatten(1, 2)
            close(out, tensors["output"])


def test_final_layer() -> None:
    for case, tensors in block_cases("final_layer"):
        T, S, width = case["T"], case["S"], case["hidden"]
        config = SharedConfig(
            hidden_size=width,
            num_heads=2,
            patch_size=(1, 1, case["num_patch"]),
            in_channels=case["out_channels"],
            pred_sigma=False,
        )
        layer = with_state(FinalLayer(config), tensors)
        condition, t = conditioned(tensors, SPATIAL, T, S, width)
        x = tensors["input/x"]
        out = layer(x.view(-1, S, width), t[:, :, 0], condition)
        close(out.view(tensors["output"].shape), tensors["output"])


def test_rotary_attention() -> None:
    for case, tensors in block_cases("rotary_attention"):
        if case["case"].startswith("rope"):
            rope = RotaryEmbedding(case["head_dim"])
            close(rope.freqs, tensors["freqs"])
            q = tensors["input/q"].transpose(1, 2)
            rows = PatchGrid(
                num_samples=len(q), latent_size=(q.shape[1], 1, 1), patch_size=(1, 1, 1)
            ).rows(TEMPORAL)
            rotation = rope.rotation(rows, False, q.device)
            close(rope(q, rotation).transpose(1, 2), tensors["output"])
        else:
            rope = RotaryEmbedding(case["hidden"] // case["heads"]) if case["rotary"] else None
            options = dict(qk_norm=case["qk_norm"], rope=rope, norm_last=case["qk_norm_legacy"])
            attention = SelfAttention(case["hidden"], case["heads"], **options)
            x = tensors["input/x"]
            rows = PatchGrid(
                num_samples=1, latent_size=(x.shape[1], 1, len(x)), patch_size=(1, 1, 1)
            ).rows(TEMPORAL)
            close(with_state(attention, tensors)(x, rows), tensors["output"])


def test_norm_and_cross_attention() -> None:
    for case, tensors in block_cases("norm_cross_attention"):
        if case["case"].startswith("rmsnorm"):
            norm = with_state(RMSNorm(12), tensors)
            close(norm(tensors["input/x"]), tensors["output"])
        else:
            x, lengths = tensors["input/x"], tensors["input/lengths"].tolist()
            attention = with_state(CrossAttention(case["hidden"], case["heads"]), tensors)
            out = attention(x, tensors["input/cond"][0], ([x.shape[1]] * len(x), lengths))
            close(out, tensors["output"])


def test_patch_embedding() -> None:
    for case, tensors in block_cases("patch_embed3d"):
        embed = with_state(
            PatchEmbed3D(tuple(case["patch"]), case["in_channels"], case["embed_dim"]), tensors
        )
        x = tensors["input/x"]
        grid = PatchGrid(
            num_samples=len(x), latent_size=tuple(x.shape[2:]), patch_size=tuple(case["patch"])
        )
        out = embed(grid.rows(SPATIAL).slice(x))
        close(out.reshape(len(x), -1, case["embed_dim"]), tensors["output"])


def test_embedders() -> None:
    for case, tensors in block_cases("timestep_embedder"):
        if case["case"].startswith("mlp"):
            embedder = TimestepEmbedder(case["hidden_size"], case["frequency_embedding_size"])
            close(with_state(embedder, tensors)(tensors["input/t"]), tensors["output"])

    for case, tensors in block_cases("size_embedder"):
        embedder = SizeEmbedder(case["hidden"], case["frequency_embedding_size"])
        close(with_state(embedder, tensors)(tensors["input/s"], case["batch"]), tensors["output"])

    for case, tensors in block_cases("caption_embedder"):
        embedder = with_state(
            CaptionEmbedder(case["in_channels"], case["hidden"], case["token_num"]), tensors
        )
        drop = tensors["input/force_drop_ids"] == 1 if "input/force_drop_ids" in tensors else None
        packed, lengths = embedder.pack(tensors["input/caption"], None, drop)
        assert lengths == [case["token_num"]] * 3
        close(embedder(packed).view(tensors["output"].shape), tensors["output"])

    for case, tensors in block_cases("pos_embed_2d"):
        if case["case"].startswith("torch"):
            base = case["base_size"]
            size = (1, case["h"], case["w"])
            # The base size that models choose.
            assert round((size[1] * size[2]) ** 0.5) == (base or case["h"])
            scale = torch.tensor(case["scale"])
            grid = PatchGrid(num_samples=1, latent_size=size, patch_size=(1, 1, 1), scale=scale)
            close(
                PositionEmbedding2D(case["dim"])(grid.rows(SPATIAL), scale.device),
                tensors["output"],
            )
        else:
            sides, base = (case["h"], case["w"]), case["base_size"]
            axes = [torch.arange(n) / case["scale"] * (base / n if base else 1) for n in sides]
            out = frame_position_embedding(*(axis.double() for axis in axes), case["dim"])
            close_table(out, tensors["output"], floor=1e-6)  # of float32 coordinates

    for case, tensors in block_cases("pos_embed_1d"):
        out = position_embedding(torch.arange(case["length"]).double() / case["scale"], case["dim"])
        close_table(out, tensors["output"], floor=1e-12)


SMALL = dict(hidden_size=24, depth=2, num_heads=2, caption_channels=4, model_max_length=3)
OWN_OPTIONS = {"STDiT": dict(input_size=(3, 4, 4)), "STDiT2": dict(qk_norm=True), "STDiT3": {}}
SIZES = {name: torch.tensor([8.0, 16.0]) for name in ("num_frames", "height", "width", "ar", "fps")}


@pytest.mark.parametrize("name", list(OWN_OPTIONS))
def test_forward_draws_no_random_numbers_and_works_without_optional_inputs(name: str) -> None:
    model = build_model(name, **SMALL, **OWN_OPTIONS[name])
    x, y = torch.randn(2, 4, 3, 4, 4), torch.randn(2, 1, 3, 4)
    before = torch.get_rng_state()
    output = model.train()(x, torch.tensor([10.0, 900.0]), y, **(SIZES if name == "STDiT2" else {}))
    assert output.shape == (2, 8, 3, 4, 4) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["STDiT", "STDiT2"])
def test_drop_path_takes_the_branches_of_one_part_away(name: str) -> None:
    """Entry 2i is for spatial attention of block i, 2i + 1 for its temporal attention and MLP."""
    model = build_model(name, **SMALL, **OWN_OPTIONS[name], drop_path=0.5).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x, y = (
        torch.randn(shape, generator=generator).double()
        for shape in [(2, 4, 3, 4, 4), (2, 1, 3, 4)]
    )
    inputs = dict(
        x=x, timestep=torch.tensor([10.0, 900.0]), y=y, **(SIZES if name == "STDiT2" else {})
    )
    branches = [
        ["0.attn.proj"],
        ["0.attn_temp.proj", "0.mlp.fc2"],
        ["1.attn.proj"],
        ["1.attn_temp.proj", "1.mlp.fc2"],
    ]

    for dropped, layers in enumerate(branches):
        without = copy.deepcopy(model)
        drop_path = torch.zeros(4, 2, dtype=torch.bool)
        drop_path[dropped, 1] = True
        output = model(**inputs, drop_path=drop_path)
        for layer in layers:
            for parameter in without.blocks.get_submodule(layer).parameters():
                torch.nn.init.zeros_(parameter)
        nothing = torch.zeros_like(drop_path)
        torch.testing.assert_close(
            output[1], without(**inputs, drop_path=nothing)[1], rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            output[0], model(**inputs, drop_path=nothing)[0], rtol=0, atol=1e-12
        )
        assert (output[1] - model(**inputs, drop_path=nothing)[1]).abs().max() > 1e-3


def test_an_empty_text_mask_counts_as_its_first_token() -> None:
    model = build_model(
        "STDiT3", hidden_size=16, depth=1, num_heads=2, caption_channels=4, model_max_length=3
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, t, y = torch.randn(1, 4, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 1, 3, 4)
    none, first = torch.tensor([[0, 0, 0]]), torch.tensor([[1, 0, 0]])
    assert torch.equal(model(x, t, y, none), model(x, t, y, first))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 2, 4, 4)}, r"got x of shape \(2, 3, 2, 4, 4\); expected \[B, 4,"),
        (
            {
                "x": torch.zeros(0, 4, 3, 4, 4),
                "timestep": torch.zeros(0),
                "y": torch.zeros(0, 1, 3, 4),
            },
            r"got x of shape \(0, 4, 3, 4, 4\); expected .* without zeros",
        ),
        ({"x": torch.zeros(2, 4, 0, 4, 4)}, r"got x of shape \(2, 4, 0, 4, 4\); expected .* zeros"),
        (
            {"y": torch.zeros(2, 1, 0, 4), "mask": torch.ones(2, 0, dtype=torch.bool)},
            r"got y of shape \(2, 1, 0, 4\); expected .* without zeros",
        ),
        ({"y": torch.zeros(2, 1, 3, 5)}, r"expected \[2, 1, L, 4\]"),
        ({"y": torch.zeros(2, 1, 4, 4)}, "at most model_max_length = 3"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"got a text mask of shape \(2, 2\)"),
        ({"mask": torch.zeros(2, 3)}, r"torch.float32 on cpu; expected .* bool or integers"),
        ({"y": torch.zeros(2, 1, 3, 4, device="meta")}, "got y of .* on meta; expected .* on cpu"),
        (
            {"x_mask": torch.ones(2, 5, dtype=torch.bool)},
            r"got x_mask of shape \(2, 5\), .* expected \[2, 3\]",
        ),
        ({"x_mask": torch.ones(2, 3)}, "got x_mask of .* torch.float32 on cpu; expected .* torch"),
        ({"drop_caption": torch.ones(2)}, "got drop_caption of .* torch.float32 on cpu; expected"),
        ({"x_mask": torch.tensor([[True, False, True]] * 2)}, "differs inside a patch of 2 frames"),
        ({"drop_path": torch.zeros(1, 2, dtype=torch.bool)}, r"expected \[2, 2\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    captions = dict(caption_channels=4, model_max_length=3)
    settings = dict(TINY, in_channels=4, hidden_size=16, depth=1, num_heads=2, **captions)
    model = build_model("STDiT3", **settings, patch_size=(2, 2, 2))
    inputs = dict(x=torch.zeros(2, 4, 3, 4, 4), timestep=torch.zeros(2), y=torch.zeros(2, 1, 3, 4))
    with pytest.raises(ValueError, match=message):
        model(**{**inputs, **change})


def test_sizes_that_a_model_cannot_take_are_refused() -> None:
    inputs = dict(x=torch.zeros(2, 4, 3, 4, 4), timestep=torch.zeros(2), y=torch.zeros(2, 1, 3, 4))
    stdit, stdit2 = (
        build_model(name, **SMALL, **OWN_OPTIONS[name]) for name in ("STDiT", "STDiT2")
    )

    with pytest.raises(ValueError, match=r"got latents of size \(3, 4, 6\); expected the"):
        stdit(**{**inputs, "x": torch.zeros(2, 4, 3, 4, 6)})

    with pytest.raises(ValueError, match=r"got input_size \(3, 5, 4\) and patch_size \(1, 2, 2\)"):
        build_model("STDiT", input_size=(3, 5, 4))
    with pytest.raises(ValueError, match="got no height, ar; expected one number per sample"):
        stdit2(
            **inputs, **{name: size for name, size in SIZES.items() if name not in ("height", "ar")}
        )

    with pytest.raises(ValueError, match="got hidden_size 32; expected a multiple of 3"):
        build_model("STDiT2", hidden_size=32, num_heads=4)
    with pytest.raises(ValueError, match="expected num_heads to divide hidden_size"):
        build_model("STDiT", hidden_size=32, num_heads=3)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'STDiT3-XL/2'"):
        build_model("STDiT3-XL2")
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        build_model("STDiT3", hiden_size=8)
    with pytest.raises(ValueError, match="num_heads to divide hidden_size, a multiple of 8"):
        build_model("STDiT3", hidden_size=30, num_heads=4)
