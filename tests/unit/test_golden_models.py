"""STDiT, STDiT2, STDiT3 and their parts against the reference values of the public releases."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
import torch
from golden_models import CASES, built, check_output_and_gradients, inputs_of
from golden_values import GOLDEN, close, load, under

from opensora_sp.models import PatchGrid, build_model
from opensora_sp.models.conditions import Text
from opensora_sp.models.layers import RMSNorm
from opensora_sp.models.positions import RotaryEmbedding
from opensora_sp.models.token_layout import TEMPORAL

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
            r"got x of shape \(0, 4, 3, 4, 4\); expected at least one sample",
        ),
        ({"x": torch.zeros(2, 4, 0, 4, 4)}, r"got x of shape \(2, 4, 0, 4, 4\); expected at least"),
        (
            {"y": torch.zeros(2, 1, 0, 4), "mask": torch.ones(2, 0, dtype=torch.bool)},
            r"got y of shape \(2, 1, 0, 4\); expected at least one",
        ),
        ({"y": torch.zeros(2, 1, 3, 5)}, r"expected \[2, 1, L, 4\]"),
        ({"y": torch.zeros(2, 1, 4, 4)}, "at most model_max_length = 3"),
        (
            {"mask": torch.ones(2, 2, dtype=torch.bool)},
            r"got a text mask of shape \(2, 2\), .* expected \[2, 3\]",
        ),
        (
            {"mask": torch.zeros(2, 3)},
            r"torch.float32 on cpu; expected .* bool or integers",
        ),
        ({"y": torch.zeros(2, 1, 3, 4, device="meta")}, "got y of .* on meta; expected .* on cpu"),
        (
            {"x_mask": torch.ones(2, 5, dtype=torch.bool)},
            r"got x_mask of shape \(2, 5\), .* expected \[2, 3\]",
        ),
        (
            {"x_mask": torch.ones(2, 3)},
            "got x_mask of .* torch.float32 on cpu; expected .* torch.bool",
        ),
        (
            {"drop_caption": torch.ones(2)},
            "got drop_caption of .* torch.float32 on cpu; expected .* torch.bool",
        ),
        ({"x_mask": torch.tensor([[True, False, True]] * 2)}, "differs inside a patch of 2 frames"),
        ({"drop_path": torch.zeros(1, 2, dtype=torch.bool)}, r"expected \[2, 2\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    model = build_model(
        "STDiT3",
        hidden_size=16,
        depth=1,
        num_heads=2,
        caption_channels=4,
        model_max_length=3,
        patch_size=(2, 2, 2),
    )
    inputs = dict(x=torch.zeros(2, 4, 3, 4, 4), timestep=torch.zeros(2), y=torch.zeros(2, 1, 3, 4))
    with pytest.raises(ValueError, match=message):
        model(**{**inputs, **change})


def test_sizes_that_a_model_cannot_take_are_refused() -> None:
    inputs = dict(x=torch.zeros(2, 4, 3, 4, 4), timestep=torch.zeros(2), y=torch.zeros(2, 1, 3, 4))
    stdit, stdit2 = (
        build_model(name, **SMALL, **OWN_OPTIONS[name]) for name in ("STDiT", "STDiT2")
    )

    with pytest.raises(
        ValueError, match=r"got latents of size \(3, 4, 6\); expected the input_size \(3, 4, 4\)"
    ):
        stdit(**{**inputs, "x": torch.zeros(2, 4, 3, 4, 6)})

    with pytest.raises(
        ValueError,
        match=r"got input_size \(3, 5, 4\) and patch_size \(1, 2, 2\); .* in whole patches",
    ):
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
    with pytest.raises(ValueError, match="even hidden_size / num_heads"):
        build_model("STDiT3", hidden_size=30, num_heads=4)


def test_norm_and_rotation_have_the_gradients_of_their_definitions() -> None:
    norm, rope = RMSNorm(6).double(), RotaryEmbedding(6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    rotation = rope.rotation(PatchGrid(2, (3, 1, 1), (1, 1, 1)).rows(TEMPORAL), False, x.device)
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradcheck(lambda x: rope(x, rotation), x)

    # As complex numbers that are multiplied by others of length 1.
    angles = torch.arange(3)[:, None, None] * rope.freqs
    pairs = torch.view_as_complex(x.detach().unflatten(-1, (-1, 2)))
    wanted = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(rope(x, rotation), wanted, rtol=1e-6, atol=1e-6)


def test_norm_and_rotation_round_once() -> None:
    """In bf16: computed in fp32, and rounded where the result is written."""
    norm, rope = RMSNorm(72), RotaryEmbedding(72)
    x = torch.randn(4, 5, 2, 72).bfloat16()
    rotation = rope.rotation(PatchGrid(4, (5, 1, 1), (1, 1, 1)).rows(TEMPORAL), False, x.device)
    assert torch.equal(norm.bfloat16()(x), norm.float()(x.float()).bfloat16())
    assert torch.equal(rope(x, rotation), rope(x.float(), rotation).bfloat16())
