"""LoRA adapters of every linear layer count; on disk, merged, and as peft reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from random_weights import draw_weights
from safetensors.torch import save_file
from tiny_models import TINY
from torch import nn

from opensora_sp.checkpoint.adapters import (
    AdapterKind,
    Adapters,
    Base,
    adapter_files,
    base_digest,
    check_adapters,
    find_adapters,
    merged,
    name_on_disk,
    open_adapters,
    parse_source,
)
from opensora_sp.checkpoint.reader import Stored, Weights
from opensora_sp.config import TrainConfig
from opensora_sp.config.sections import Lora
from opensora_sp.models import build_model
from opensora_sp.models.lora import ADAPTER, add_lora, lora_layers
from opensora_sp.planner.memory import FP32, ModelSizes, Persistent, Zero, training_peak
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.seconds import FROZEN_STEP, STEP, ModelFlops
from opensora_sp.planner.trace import Activations, small_meta_model
from opensora_sp.training.trainable import DropoutDraws

SIZE = (3, 4, 4)
COMMON = dict(
    hidden_size=24, depth=2, num_heads=3, caption_channels=5, model_max_length=6, mlp_ratio=2.0
)
MODELS: dict[str, dict[str, Any]] = {
    "STDiT": dict(input_size=SIZE),
    "STDiT2": dict(qk_norm=True),
    "STDiT3": {},
}
RANK, ALPHA = 3, 5.0
KINDS = [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True}]


def made(name: str = "STDiT3", targets: tuple[str, ...] = ("*",), **options: Any) -> nn.Module:
    """A model with adapters, all of whose weights are drawn, in float64."""
    torch.manual_seed(0)
    model = draw_weights(build_model(name, **COMMON, **MODELS[name]).double(), std=0.2)
    if targets:
        add_lora(model, rank=RANK, alpha=ALPHA, targets=targets, **options)
    return draw_weights(model, std=0.2)


def computed(model: nn.Module, frames: int = SIZE[0]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input gradient of two clips; the text of one is encoded beforehand."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, frames, *SIZE[1:], generator=generator, dtype=torch.float64)
    y = torch.randn(2, 1, 6, 5, generator=generator, dtype=torch.float64)
    numbers = {name: torch.full((2,), 24.0).double() for name in model.sample_inputs}
    x.requires_grad_()
    text = model.encode_text(y) if frames == 1 else y
    out = model(x, torch.tensor([300.0, 700.0]).double(), text, **numbers)
    (gradient,) = torch.autograd.grad(out.square().mean(), x)
    return out.detach(), gradient


def on_disk(model: nn.Module, folder: Path, base: Base | None = None, **kind: bool) -> Path:
    """A model's adapters as a run saves them."""
    trained = {name_on_disk(n): p.data for n, p in model.named_parameters() if p.requires_grad}
    folder.mkdir(exist_ok=True)
    save_file(trained, folder / "adapter_model.safetensors")
    facts = AdapterKind(RANK, ALPHA, **kind), base or Base("base", "0")
    for name, data in adapter_files(list(lora_layers(model)), *facts).items():
        (folder / name).write_bytes(data)
    return folder


def base_of(model: nn.Module) -> Weights:
    """The weights that a model's adapters are for."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {
        name.replace(".base_layer.", "."): Stored(tuple(tensor.shape), tensor.clone)
        for name, tensor in model.state_dict().items()
        if name not in trained
    }
    return Weights(Path("base"), "", None, tensors)


def with_merged(name: str, model: nn.Module, *adapters: Adapters) -> nn.Module:
    """A bare model with adapters merged into its weights."""
    bare = made(name, ())
    weights = merged(base_of(model), adapters)
    bare.load_state_dict({n: stored.read() for n, stored in weights.tensors.items()})
    return bare


def assert_close(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_no_linear_layer_leaves_its_adapter_out(name: str, tmp_path: Path) -> None:
    """What a model computes from weights directly would not see an adapter."""
    model = made(name)
    layers = lora_layers(model)
    assert len(layers) > 15 and not any("lora" in layer for layer in layers)
    adapters = open_adapters(str(on_disk(model, tmp_path / "all")))
    check_adapters(adapters, made(name, ()))
    assert set(adapters.layers) == set(layers) and adapters.kind.scaling == ALPHA / RANK
    # Several frames, and images: single tokens take another way through attention.
    for frames in (SIZE[0], 1) if name != "STDiT" else (SIZE[0],):
        assert_close(computed(model, frames), computed(with_merged(name, model, adapters), frames))

    # Alone, each adapter changes the result.
    ups = {layer: module.lora_B[ADAPTER].weight for layer, module in layers.items()}
    kept = {layer: up.data.clone() for layer, up in ups.items()}
    for up in ups.values():
        up.data.zero_()
    without = computed(model)[0]
    for layer, up in ups.items():
        up.data.copy_(kept[layer])
        assert not torch.allclose(computed(model)[0], without, rtol=1e-6), layer
        up.data.zero_()


def test_by_default_the_blocks_are_adapted_and_nothing_changes_at_first() -> None:
    torch.manual_seed(0)
    model = draw_weights(build_model("STDiT3", **COMMON).double(), std=0.2)
    before = computed(model)
    add_lora(model, rank=RANK, alpha=ALPHA)
    assert_close(computed(model), before)
    kinds = {layer.partition(".")[2].partition(".")[2] for layer in lora_layers(model)}
    attention = {"attn.qkv", "attn.proj"}
    cross = {f"cross_attn.{one}" for one in ("q_linear", "kv_linear", "proj")}
    assert kinds == attention | cross | {"mlp.fc1", "mlp.fc2"}
    assert len(lora_layers(model)) == 4 * len(kinds)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["qkv"], "'qkv' in lora.targets.*did you mean '\\*.qkv'"),
        (["*.attn.qkw"], "did you mean '\\*.attn.qkv'"),
        (["x_embedder.proj"], "matches no linear layer of STDiT3"),
        (["*", "!*.atn.proj"], "'!\\*.atn.proj' in lora.targets.*did you mean '\\*.attn.proj'"),
        (["*.qkv", "!*"], "leave no layer to adapt"),
    ],
)
def test_unknown_targets(targets: list[str], message: str) -> None:
    with torch.device("meta"):
        model = build_model("STDiT3", **COMMON)
    with pytest.raises(ValueError, match=message):
        add_lora(model, rank=1, alpha=1, targets=targets)
    assert all(p.requires_grad for n, p in model.named_parameters() if n != "rope.freqs")


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_a_run_saves(kind: dict[str, bool], tmp_path: Path) -> None:
    targets = ("*.attn.qkv", "*mlp.fc?", "!temporal_blocks.1.*")
    model, bare = made(targets=targets, **kind), made(targets=())
    bare.load_state_dict({n: stored.read() for n, stored in base_of(model).tensors.items()})
    folder = on_disk(model, tmp_path / "lora", **kind)
    theirs = PeftModel.from_pretrained(bare, str(folder))
    assert_close(computed(theirs.get_base_model()), computed(model))
    assert len(lora_layers(theirs.get_base_model())) == 4 * 3 - 3
    assert_close(
        computed(with_merged("STDiT3", model, open_adapters(str(folder)))), computed(model)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_read(kind: dict[str, bool], tmp_path: Path) -> None:
    """Also in two halves, which are one; pickles are not read."""
    theirs = get_peft_model(
        made(targets=()),
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["qkv"], **kind),
    )
    draw_weights(theirs, std=0.2)
    theirs.save_pretrained(str(tmp_path / "safe"))
    theirs.save_pretrained(str(tmp_path / "pickled"), safe_serialization=False)
    model = theirs.get_base_model()

    adapters = open_adapters(str(tmp_path / "safe"))
    assert adapters.base is None
    assert_close(computed(with_merged("STDiT3", model, adapters)), computed(model))
    half = open_adapters(f"{tmp_path / 'safe'}:0.5")
    assert half.scale == 0.5
    assert_close(computed(with_merged("STDiT3", model, half, half)), computed(model))
    with pytest.raises(ValueError, match="without adapter_model.safe.*safe_serialization=True"):
        open_adapters(str(tmp_path / "pickled"))


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_keeps_the_same_features_of_all_tokens(*, use_dora: bool) -> None:
    """In training only, and as a mask of the input of peft's formula."""
    model = made(targets=("*.mlp.fc1",), dropout=0.5, use_dora=use_dora)
    layers = lora_layers(model)
    layer = layers["spatial_blocks.0.mlp.fc1"]
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    layer.eval()
    without = layer(x)
    layer.train()
    torch.testing.assert_close(layer(x), without)

    masks = []
    for micro_batch in (0, 1, 0):
        DropoutDraws(model, seed=3).draw(micro_batch)
        masks.append(torch.cat([layer.lora_dropout[ADAPTER].kept for layer in layers.values()]))
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    assert masks[0].unique().tolist() == [0, 2] and masks[0].shape == (4 * 24,)
    kept = layer.lora_dropout[ADAPTER].kept
    masked, base = x * kept, layer.base_layer
    up, down = layer.lora_B[ADAPTER].weight, layer.lora_A[ADAPTER].weight
    expected = base(x) + ALPHA / RANK * masked @ down.t() @ up.t()
    if use_dora:
        norms = layer.lora_magnitude_vector[ADAPTER].weight
        whole = base.weight + ALPHA / RANK * up @ down
        ratios = norms / whole.norm(dim=1)
        product = (ratios - 1) * (masked @ base.weight.t())
        expected = base(x) + product + ratios * ALPHA / RANK * (masked @ down.t() @ up.t())
    torch.testing.assert_close(layer(x), expected)
    layer.eval()
    torch.testing.assert_close(layer(x), without)
    layer.train()
    with DropoutDraws(model, seed=3).dropped(micro_batch=0):
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x), without)


def test_dora_begins_at_the_norms_of_the_weights() -> None:
    torch.manual_seed(0)
    model = draw_weights(build_model("STDiT3", **COMMON).double(), std=0.2)
    before = computed(model)
    add_lora(model, rank=RANK, alpha=ALPHA, use_dora=True)
    assert_close(computed(model), before)
    with torch.no_grad():
        model = build_model("STDiT3", **COMMON)
        model.spatial_blocks[0].mlp.fc1.weight[3] = 0
    with pytest.raises(ValueError, match="rows of zeros; expected.*'!spatial_blocks.0.*fc1'"):
        add_lora(model, rank=RANK, alpha=ALPHA, use_dora=True, targets=["*.fc1"])


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    adapters = open_adapters(str(on_disk(made(), tmp_path / "lora", Base("weights/mine", "0"))))
    with torch.device("meta"):
        shallow = build_model("STDiT3", **{**COMMON, "depth": 1})
        wide = build_model("STDiT3", **{**COMMON, "hidden_size": 48})
    with pytest.raises(ValueError, match=r"got adapters of 'spatial_blocks.1.attn.proj' and 13"):
        check_adapters(adapters, shallow)
    with pytest.raises(ValueError, match="did you mean 'spatial_blocks.0.attn.proj'.*weights/mine"):
        check_adapters(adapters, shallow)
    with pytest.raises(ValueError, match=r"has A \[3, 24\] and B \[72, 3\]; expected them for a w"):
        check_adapters(
            Adapters(
                adapters.path,
                adapters.weights.only([n for n in adapters.weights.tensors if "attn.qkv" in n]),
                AdapterKind(RANK, ALPHA),
                None,
            ),
            wide,
        )


def test_folders_that_hold_no_plain_adapters_are_refused(tmp_path: Path) -> None:
    folder = on_disk(made(targets=("*.qkv",)), tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text())

    def refused(message: str, source: str | Path = folder) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            open_adapters(str(source))
        assert "got " in str(caught.value) and "; expected " in str(caught.value)

    refused("no adapter_config.json.*check the path", tmp_path / "nothing")
    refused("pass whole weights as --ckpt", tmp_path)
    refused("a finite number", f"{folder}:nan")
    for changed, message in (
        ({"use_dora": True}, "without lora_magnitude_vector"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"r": 0}, "r = 0"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"r": RANK + 1}, rf"for adapters of rank \[{RANK}\]"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | changed))
        refused(message)
    (folder / "adapter_config.json").write_text("[]")
    refused("no names and values")

    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "base.json").write_text("{}")
    refused("without texts for name and sha256")
    (folder / "base.json").unlink()
    weights = folder / "adapter_model.safetensors"
    save_file({"x.lora_A.weight": torch.ones(1, 2)}, weights)
    refused("without lora_B")
    save_file({"x.lora_A.weight": torch.ones(1, 2, 3)}, weights)
    refused("expected lora_A and lora_B of linear layers alone")
    weights.unlink()
    refused("without adapter_model.safetensors")


def test_paths_and_scales(tmp_path: Path) -> None:
    assert parse_source("outputs/run") == ("outputs/run", 1.0)
    assert parse_source("outputs/run:0.8") == ("outputs/run", 0.8)
    assert parse_source("C:/run") == ("C:/run", 1.0)
    odd = tmp_path / "run:2"
    assert parse_source(str(odd)) == (str(tmp_path / "run"), 2.0)
    on_disk(made(targets=("*.qkv",)), odd)
    assert parse_source(str(odd)) == (str(odd), 1.0)
    assert find_adapters(odd / "adapter_model.safetensors") == odd
    assert find_adapters(tmp_path) is None


def test_a_base_is_recognised_in_another_precision() -> None:
    weights = base_of(made())
    layers = ["temporal_blocks.0.attn.qkv", "spatial_blocks.0.mlp.fc1"]

    def changed(**new: torch.Tensor) -> str:
        tensors = dict(weights.tensors)
        for name, tensor in new.items():
            tensors[name] = Stored(tuple(tensor.shape), tensor.clone)
        return base_digest(Weights(weights.path, "", None, tensors), layers)

    name = f"{layers[0]}.weight"
    weight = weights.tensors[name].read()
    same = base_digest(weights, layers)
    assert changed(**{name: weight.bfloat16()}) == changed(y=weight) == same
    other = weight.clone()
    other[-1, -1] *= 1.01
    assert changed(**{name: other}) != same


def test_the_planner_counts_what_is_trained() -> None:
    config = made(targets=()).config
    # The adapters of one of the temporal blocks: a traced model with fewer blocks has them too.
    lora = Lora(rank=RANK, targets=("temporal_blocks.1.*",))
    sizes = ModelSizes.of("STDiT3", config, lora)
    bare = ModelSizes.of("STDiT3", config)
    per_layer = [24 + 72, 24 + 24, 24 + 24, 24 + 48, 24 + 24, 24 + 48, 48 + 24]
    assert sorted(sizes.trainable) == sorted(
        RANK * n for n in (24, 72, 24, 24, 24, 24, 24, 48, 24, 24, 24, 48, 48, 24)
    )
    assert sum(sizes.trainable) == RANK * sum(per_layer) and sizes.frozen == bare.total
    assert not sizes.pairs[0] and sizes.pairs[1] and not sizes.rest and not sizes.final
    traced = small_meta_model("STDiT3", config, 1, torch.bfloat16, lora)
    assert {p.dtype for p in traced.parameters() if p.requires_grad} == {torch.bfloat16}
    assert [name.partition(".")[0] for name in lora_layers(traced)] == ["temporal_blocks"] * 7

    zero = Zero(world=2, stage=2, element_size=2)
    state = Persistent.training(sizes, zero, saves_frozen=False)
    trained = sum(sizes.trainable)
    assert state.weights == 2 * (bare.total + trained)
    assert state.master_weights == state.ema == FP32 * trained / 2
    assert state.moments == FP32 * (trained + len(sizes.trainable))
    peak = training_peak(state, sizes, zero, Activations(first=1e6, pair=1e5, inputs=10))
    assert peak.activations == 1e6 + 2 * 1e5
    assert peak.gradients <= 3 * 2 * trained


def test_frozen_layers_have_no_gradients_of_weights() -> None:
    plain, adapted = made(targets=()), made(targets=("*blocks.*",))
    whole, found = ModelFlops.of(plain), ModelFlops.of(adapted)
    assert whole.frozen_per_token == whole.frozen_per_text_token == 0
    latents, text = (2, 4, *SIZE), 12
    of_adapters = [
        found.per_token - found.frozen_per_token,
        found.per_text_token - found.frozen_per_text_token,
    ]
    assert found.frozen_per_token == whole.per_token
    assert found.frozen_per_text_token == whole.per_text_token
    # Of a token: per pair of blocks twice its seven layers but those of the text.
    by_layer = 2 * RANK * ((24 + 72) + 3 * (24 + 24) + 2 * (24 + 48))
    assert of_adapters == [4 * by_layer, 4 * 2 * RANK * (24 + 48)]
    ratio = found.step(latents, text) / found.forward(latents, text)
    assert FROZEN_STEP < ratio < STEP == whole.step(latents, text) / whole.forward(latents, text)


CAPTIONS = dict(caption_channels=8, model_max_length=12)
CONFIG = dict(
    num_frames=8,
    image_size=(32, 32),
    vae=dict(type="PatchPoolVAE", pool=(1, 4, 4)),
    text_encoder=dict(type="HashedBagOfWords", width=8, max_length=12),
    model=dict(TINY, in_channels=3, type="STDiT3", pred_sigma=False, **CAPTIONS),
    dataset=dict(manifest="clips.csv"),
    max_steps=1,
)


def test_adapters_need_a_base_and_freeze_it() -> None:
    cfg = TrainConfig(**CONFIG, lora=dict(rank=4), load="weights")
    assert cfg.lora == Lora(rank=4, alpha=16.0, targets=("*blocks.*",))
    # Checkpoints hold adapters alone, so a run keeps no fp32 copies of what is frozen.
    run = RunEstimator(cfg, 1, device="cpu")
    assert run.persistent.weights == run.dtype.itemsize * run.sizes.total
    with pytest.raises(ValueError, match="got lora without load.*set load='PATH'"):
        TrainConfig(**CONFIG, lora=dict(rank=4))
    with pytest.raises(ValueError, match="with lora, which freezes all weights.*lora.targets"):
        TrainConfig(**CONFIG, lora={}, load="weights", freeze=("y_embedder.*",))
    with pytest.raises(ValueError, match="lora.rank|rank"):
        TrainConfig(**CONFIG, lora=dict(rank=0), load="weights")
