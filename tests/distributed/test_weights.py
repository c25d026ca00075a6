"""Weights on disk: every layout users have, what is refused, the conversions, and the way back."""

from __future__ import annotations

import json
import logging
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_values import close, load
from random_weights import draw_weights
from ranks import run_ranks
from runs import ROOT, SAMPLE, TRAIN
from safetensors.torch import load_file, save_file
from tiny_models import TINY

from opensora_sp.checkpoint import find_weights, from_pretrained, save_pretrained
from opensora_sp.checkpoint.model_config import check_model_config, write_model_config
from opensora_sp.checkpoint.paths import weight_files
from opensora_sp.checkpoint.reader import open_weights
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.checkpoint.zero_shards import copy_weights
from opensora_sp.cli import main
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.models import STDiT, STDiT2, STDiT3, build_model
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.run import build_pipeline
from opensora_sp.sampling.run import preflight as sampling_preflight
from opensora_sp.training.preflight import check_initial_weights

pytestmark = pytest.mark.core
SMALL = dict(TINY, in_channels=3, caption_channels=8, model_max_length=12)
TABLE = dict(SMALL, input_size=(4, 8, 6), space_scale=0.5)
FOREIGN = {  # what the public folders say beside the model's settings
    "_name_or_path": "somewhere",
    "auto_map": {},
    "enable_flash_attn": True,
    "enable_layernorm_kernel": True,
    "enable_sequence_parallelism": False,
    "freeze_y_embedder": True,
    "input_size": [None, None, None],
    "only_train_temporal": False,
    "torch_dtype": "float32",
    "transformers_version": "4.36.2",
}
State = dict[str, torch.Tensor]


def drawn(name: str, seed: int = 0, **options: Any) -> Any:
    """A model whose weights are all drawn at random."""
    torch.manual_seed(seed)  # for the null caption
    return draw_weights(build_model(name, **options), seed=seed)


def same(ours: State, theirs: State) -> bool:
    """The same names in the same dtype to the last bit."""
    for name in ours.keys() & theirs.keys():
        one, other = (state[name].contiguous().view(torch.uint8) for state in (ours, theirs))
        if ours[name].dtype != theirs[name].dtype or not torch.equal(one, other):
            return False
    return ours.keys() == theirs.keys()


def inputs(
    model: Any, frames: int = 4, height: int = 8, width: int = 6, text: int = 7
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return dict(
        x=torch.randn(2, model.config.in_channels, frames, height, width, generator=generator),
        timestep=torch.tensor([100.0, 900.0]),
        y=torch.randn(2, 1, text, model.config.caption_channels, generator=generator),
        mask=(torch.arange(text) < torch.tensor([[3], [text]])).long(),
    )


@pytest.fixture(scope="module")
def model() -> STDiT3:
    return drawn("STDiT3", **SMALL)


@pytest.fixture
def state(model: STDiT3) -> State:
    return model.state_dict()


def refused(message: str, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    text = str(error.value)
    assert message in text and text.startswith("got ") and "; expected " in text, text
    return text


# Layouts. Each writes into a folder and returns what a user passes.


def hf_folder(model: STDiT3, folder: Path) -> dict[str, Any]:
    save_pretrained(model, folder / "hf")
    return dict(path=folder / "hf")


def hf_shards(model: STDiT3, folder: Path) -> dict[str, Any]:
    save_pretrained(model, folder / "hf", max_shard_size="20KB")
    assert len(list((folder / "hf").glob("model-0*.safetensors"))) > 2
    assert (folder / "hf/model.safetensors.index.json").is_file()
    return dict(path=folder / "hf")


def variant(model: STDiT3, folder: Path) -> dict[str, Any]:
    """Shards and index as transformers and diffusers write them with variant="fp16"."""
    path = hf_shards(model, folder)["path"]
    for shard in path.glob("model-*.safetensors"):
        shard.rename(path / shard.name.replace("model-", "model.fp16-"))
    index = path / "model.safetensors.index.json"
    content = index.read_text().replace('"model-', '"model.fp16-')
    (path / "model.safetensors.index.fp16.json").write_text(content)
    index.unlink()
    assert len(weight_files(path)) > 3
    return dict(path=path)


def pickled_variant(model: STDiT3, folder: Path) -> dict[str, Any]:
    names = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        names[name] = f"pytorch_model.fp16-{number:05d}.bin"
        torch.save({name: tensor.clone()}, folder / names[name])
    (folder / "pytorch_model.bin.index.fp16.json").write_text(json.dumps({"weight_map": names}))
    write_model_config(folder, "STDiT3", model.config)
    return dict(path=folder, allow_pickle=True)


def diffusers_folder(model: STDiT3, folder: Path) -> dict[str, Any]:
    path = hf_folder(model, folder)["path"]
    (path / "model.safetensors").rename(path / "diffusion_pytorch_model.safetensors")
    return dict(path=path)


def one_safetensors(model: STDiT3, folder: Path) -> dict[str, Any]:
    save_file(model.state_dict(), folder / "weights.safetensors")
    return dict(path=folder / "weights.safetensors", model="STDiT3", **SMALL)


def pickled(
    name: str, wrap: Callable[[State], Any] = dict, **more: Any
) -> Callable[..., dict[str, Any]]:
    def write(model: STDiT3, folder: Path) -> dict[str, Any]:
        torch.save(wrap(model.state_dict()), folder / name)
        return dict(path=folder / name, model="STDiT3", allow_pickle=True, **SMALL, **more)

    return write


def pickled_folder(model: STDiT3, folder: Path) -> dict[str, Any]:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    write_model_config(folder, "STDiT3", model.config)
    return dict(path=folder, allow_pickle=True)


def safetensors_first(model: STDiT3, folder: Path) -> dict[str, Any]:
    """Both are there: the pickle is not touched, and needs no leave."""
    (folder / "pytorch_model.bin").write_bytes(b"not to be read")
    save_file(model.state_dict(), folder / "other_name.safetensors")
    write_model_config(folder, "STDiT3", model.config)
    return dict(path=folder)


def averages_of_open_sora(model: STDiT3, folder: Path) -> dict[str, Any]:
    checkpoint = folder / "epoch0-global_step10"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "optimizer").mkdir()
    (checkpoint / "running_states.json").write_text("{}")
    save_file(
        drawn("STDiT3", seed=5, **SMALL).state_dict(), checkpoint / "model" / "model.safetensors"
    )
    write_model_config(checkpoint / "model", "STDiT3", model.config)
    torch.save(model.state_dict(), checkpoint / "ema.pt")
    return dict(path=checkpoint, ema=True, allow_pickle=True)


def run_of_ours(model: STDiT3, folder: Path) -> dict[str, Any]:
    for step, seed in [(3, 5), (6, None)]:
        for part in ("model", "ema"):
            place = folder / f"run/step_{step:08d}" / part
            place.mkdir(parents=True)
            chosen = model if (part, seed) == ("ema", None) else drawn("STDiT3", seed=7, **SMALL)
            save_file(chosen.state_dict(), place / "model.safetensors")
            write_model_config(place, "STDiT3", model.config)
        (place.parent / "COMMIT").write_text("1\n")
    return dict(path=folder / "run", ema=True)


def prefixed(state: State) -> State:
    return {f"module.{name}": tensor for name, tensor in state.items()}


LAYOUTS = {
    "Hugging Face folder": hf_folder,
    "Hugging Face shards": hf_shards,
    "diffusers folder": diffusers_folder,
    "shards of a variant": variant,
    "pickled shards of a variant": pickled_variant,
    "safetensors file": one_safetensors,
    "pth": pickled("weights.pth"),
    "state_dict and more": pickled("a.pt", lambda s: {"epoch": 3, "state_dict": s}),
    "module prefix": pickled("a.pt", lambda s: {"model": prefixed(s)}),
    "model and ema": pickled("a.pt", lambda s: {"model": {"a": torch.ones(1)}, "ema": s}, ema=True),
    "ema and model": pickled("a.pt", lambda s: {"ema": {"a": torch.ones(1)}, "model": s}),
    "pickled folder": pickled_folder,
    "safetensors first": safetensors_first,
    "averages of Open-Sora": averages_of_open_sora,
    "run of ours": run_of_ours,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_to_the_last_bit(layout: str, model: STDiT3, tmp_path: Path) -> None:
    given = LAYOUTS[layout](model, tmp_path)
    read = from_pretrained(**given)
    assert type(read) is STDiT3 and read.config == model.config
    assert same(read.state_dict(), model.state_dict())
    assert [p.requires_grad for p in read.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    shutil.rmtree(tmp_path)  # the weights are the model's own
    read.x_embedder.proj.bias.data += 1
    assert torch.isfinite(read(**inputs(read))).all()


def booster_folders(folder: Path) -> None:
    """What ColossalAI's Booster writes with its own ZeRO plugin; training started from a pickle."""
    from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroCheckpointIO

    from opensora_sp.checkpoint.zero_shards import NamedShards
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster
    from opensora_sp.training.checkpointing import fixed_tensors

    plugin = SequenceParallelPlugin(sp_size=2, stage=2, precision="fp32")
    booster, bare = Booster(plugin=plugin), drawn("STDiT3", **SMALL)
    optimizer = torch.optim.SGD([p for p in bare.parameters() if p.requires_grad], lr=0.1)
    fixed = fixed_tensors(bare)
    # Of what is trained there are master weights, and no second copies.
    assert fixed and not any(
        p.requires_grad for name, p in bare.named_parameters() if name in fixed
    )
    boosted, optimizer, *_ = booster.boost(bare, optimizer)
    for shard in (True, False):
        for safe in (True, False):
            name = "model.safetensors" if safe and not shard else "model"
            path = folder / f"shard={shard} safe={safe}" / name
            path.parent.mkdir(exist_ok=True)
            LowLevelZeroCheckpointIO().save_model(
                boosted, str(path), shard=shard, use_safetensors=safe, size_per_shard=0.01
            )
    other = drawn("STDiT3", seed=4, **SMALL)
    if plugin.mesh.rank == 0:
        torch.save({"state_dict": other.state_dict()}, folder / "other.pth")
    torch.distributed.barrier()
    shards = NamedShards(bare, optimizer)
    weights = fitted(open_weights(folder / "other.pth", allow_pickle=True), bare)
    copy_weights(weights, bare, shards, fixed)
    wanted = other.state_dict()
    assert same(bare.state_dict(), wanted) and same(fixed, {name: wanted[name] for name in fixed})
    for name, master in shards.master_weights.items():
        assert torch.equal(master, shards.cut(name, wanted[name])), name


@pytest.mark.slow
def test_folders_of_a_real_booster(model: STDiT3, tmp_path: Path) -> None:
    run_ranks(2, booster_folders, tmp_path)
    for folder in sorted(p for p in tmp_path.iterdir() if p.is_dir()):
        shard, safe = "shard=True" in folder.name, "safe=True" in folder.name
        assert len(list(folder.glob("model/*.index.json"))) == shard
        options = dict(model="STDiT3", allow_pickle=not safe, **SMALL)
        for path in (folder, *folder.glob("model*")):
            assert same(from_pretrained(path, **options).state_dict(), model.state_dict()), path
        if not safe:
            refused("which is pickled", from_pretrained, folder, model="STDiT3", **SMALL)


def test_pickles_are_read_only_when_allowed(model: STDiT3, state: State, tmp_path: Path) -> None:
    """The error has the command that converts them; hostile ones are in test_pickles.py."""
    torch.save(state, tmp_path / "a.pth")
    refusal = refused(
        "which is pickled", from_pretrained, tmp_path / "a.pth", model="STDiT3", **SMALL
    )
    command = f"opensora-sp convert {tmp_path}/a.pth {tmp_path}/a-safetensors --allow-pickle"
    assert f"{command} --model NAME, or pass allow_pickle=True (--allow-pickle)" in refusal

    (tmp_path / "folder").mkdir()
    folder = pickled_folder(model, tmp_path / "folder")["path"]
    refusal = refused("which is pickled", from_pretrained, folder)
    command = refusal.partition("convert it once: ")[2].partition(", or pass")[0]
    main(shlex.split(command)[1:])
    assert same(from_pretrained(f"{folder}-safetensors").state_dict(), state)


def test_errors_for_places_without_weights_say_what_to_do(state: State, tmp_path: Path) -> None:
    refused(
        "hf download hpcai-tech/OpenSora-STDiT-v3", find_weights, "hpcai-tech/OpenSora-STDiT-v3"
    )
    refused("which holds no weights;", find_weights, tmp_path)
    (tmp_path / "train.log").touch()
    refused("weights yet, since its training has saved no checkpoint", find_weights, tmp_path)
    (tmp_path / "adapter_config.json").touch()
    refused("which holds LoRA adapters", find_weights, tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    refused("a Git LFS pointer", open_weights, tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    half = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(half[: len(half) // 2])
    refused("which is damaged", open_weights, tmp_path)
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.pth", "b.pth", "optimizer.bin"):
        (two / name).touch()
    refused("holds 2 files of weights (a.pth, b.pth)", find_weights, two)
    (tmp_path / "step_00000003" / "model").mkdir(parents=True)
    refused("which holds no weights", find_weights, tmp_path / "step_00000003")  # not committed
    (tmp_path / "epoch0-global_step10" / "model").mkdir(parents=True)
    refused("use_ema=False", find_weights, tmp_path / "epoch0-global_step10", ema=True)


def test_an_index_that_does_not_fit_its_shards_is_refused(model: STDiT3, tmp_path: Path) -> None:
    folder = hf_shards(model, tmp_path)["path"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    (folder / last).rename(tmp_path / last)
    refused(f"1 are absent ({last})", open_weights, folder)
    shutil.copy(folder / first, folder / last)
    refused("where it is not", open_weights, folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    refused("not an index of shards (KeyError('weight_map'))", open_weights, folder)
    save_file(model.state_dict(), tmp_path / "outside.safetensors")

    for content, message in [
        ("{", "which is not an index of shards"),
        ({"weight_map": {}}, "which is not an index of shards"),
        ({"weight_map": [1]}, "which is not an index of shards"),
        ({"weight_map": {"a": 1}}, "which is not an index of shards"),
        ({"weight_map": {"a": "gone.safetensors"}}, "1 are absent (gone.safetensors)"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "which names '../outside.safetensors'"),
        (
            {"weight_map": {"a": str(tmp_path / "outside.safetensors")}},
            "expected files of the same folder",
        ),
    ]:
        (folder / "model.safetensors.index.json").write_text(
            content if content == "{" else json.dumps(content)
        )
        # Sampling asks for the files first, for their digests.
        for look in (
            open_weights,
            weight_files,
        ):
            refused(message, look, folder)


# What does not fit.


def test_strict_loading_reports_every_difference(
    state: State, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = dict(state)
    for block in range(2):
        del state[f"spatial_blocks.{block}.attn.qkv.weight"]
    state["controlnet.weight"] = torch.ones(2)
    state["t_block.1.bias"] = torch.full((150,), 7.0)
    save_file(state, tmp_path / "a.safetensors")
    message = refused(
        "got weights of another model", STDiT3.from_pretrained, tmp_path / "a.safetensors", **SMALL
    )

    assert (
        "4 differences: missing spatial_blocks.*.attn.qkv.weight (2 times); "
        "unexpected controlnet.weight; "
    ) in message
    assert "of another shape t_block.1.bias [150], not [144]" in message
    assert "conversion" not in message

    loose = STDiT3.from_pretrained(tmp_path / "a.safetensors", strict=False, **SMALL)
    assert "4 differences: missing spatial_blocks.*.attn.qkv.weight" in caplog.text
    ours = loose.state_dict()
    assert all(
        torch.equal(ours[name], state[name])
        for name in ours
        if name in state and name != "t_block.1.bias"
    )
    assert not any(tensor.is_meta for tensor in ours.values()) and ours["t_block.1.bias"].shape == (
        144,
    )

    save_file({"controlnet.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    refused(
        "another model", STDiT3.from_pretrained, tmp_path / "a.safetensors", strict=False, **SMALL
    )


# config.json of the public folders.


def starting_with(prefix: str, tensors: State) -> State:
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors[name] for name in names}


OFFICIAL = {
    "stdit3_v12_plain": STDiT3,
    "stdit2_v11_legacy_norm": STDiT2,
    "stdit2_v12_framemask": STDiT2,
}
OFFICIAL |= {"stdit3_v13_plain": STDiT3, "stdit3_v13_window_cond": STDiT3}


def official(name: str, folder: Path, **more: Any) -> tuple[dict[str, Any], State]:
    """A folder as the release writes it, with the weights of a golden case."""
    about, tensors = load("models", name)
    folder.mkdir(exist_ok=True)
    said = {
        **about["constructor"],
        **FOREIGN,
        "architectures": [about["model"]],
        "model_type": about["model"],
    }
    if about["upstream_release"] == "v1.2.0" and about["model"] == "STDiT2":
        said["qk_norm_legacy"] = False  # this release writes the key
    if about["upstream_release"] == "v1.3":
        said.setdefault("kernel_size", None)  # as this one does
    (folder / "config.json").write_text(json.dumps({**said, **more}))
    state = starting_with("state/", tensors)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return about, tensors


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_folders_give_the_released_output(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, tensors = official(name, tmp_path)
    with caplog.at_level(logging.INFO, "opensora_sp"):
        model = OFFICIAL[name].from_pretrained(tmp_path)
    assert "config.json: ignored _name_or_path, architectures" in caplog.text
    assert ("is of Open-Sora 1.1: qk_norm_legacy=True" in caplog.text) == ("v11" in name)
    assert ("is of Open-Sora 1.3" in caplog.text) == ("v13" in name)
    given = starting_with("input/", tensors)
    if "mask_index" in given:
        given["mask_index"] = given["mask_index"].tolist()
    close(model(**given), tensors["output"])


def test_settings_that_may_change_the_model_are_refused(tmp_path: Path) -> None:
    for more, message in [
        ({"kernel": 8}, "with kernel = 8 in config.json"),
        ({"no_temporal_pos_emb": True}, "with no_temporal_pos_emb = True in config.json"),
        (
            {"architectures": ["T5Model"], "model_type": "t5"},
            "with a config.json of ['T5Model', 't5']",
        ),
        ({"hidden_size": 63}, "of whose config.json no model can be built: got hidden_size 63"),
        ({"depth": "two"}, "no model can be built: got depth = 'two' for STDiT3; expected int"),
    ]:
        official("stdit3_v12_plain", tmp_path / "a", **more)
        with pytest.raises(ValueError) as error:
            from_pretrained(tmp_path / "a")
        assert message in str(error.value)

    official("stdit3_v12_plain", tmp_path / "a", no_temporal_pos_emb=False)
    assert from_pretrained(tmp_path / "a", drop_path=0.5).config.drop_path == 0.5
    (tmp_path / "a" / "config.json").write_text("{")
    refused("which is not JSON", from_pretrained, tmp_path / "a")


# Conversions.


@pytest.mark.parametrize("length", [5, 12, 30])
def test_null_caption_of_another_length(length: int, model: STDiT3, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path / "hf")
    if length != 12:
        differing, options = "y_embedder.y_embedding [12, 8], not", dict(model_max_length=length)
        message = refused(differing, from_pretrained, tmp_path / "hf", **options)
        assert "convert=['y_embedding']" in message

    other = from_pretrained(tmp_path / "hf", model_max_length=length, convert=["y_embedding"])
    null, was = other.y_embedder.y_embedding, model.y_embedder.y_embedding
    wanted = was[:length] if length <= 12 else torch.cat([was, was[-1:].expand(length - 12, -1)])
    assert other.config.model_max_length == length and torch.equal(null, wanted)

    given = inputs(model, text=5)
    assert torch.equal(other(**given), model(**given))  # captions do not depend on the null caption


@pytest.mark.parametrize("patch_size", [(1, 2, 2), (2, 1, 2)])
def test_without_sigma_the_rest_of_the_output_is_the_same(
    patch_size: tuple[int, int, int], tmp_path: Path
) -> None:
    model = drawn("STDiT3", **SMALL, patch_size=patch_size)
    save_pretrained(model, tmp_path / "hf")
    message = refused(
        "final_layer.linear.weight", from_pretrained, tmp_path / "hf", pred_sigma=False
    )

    assert "convert=['pred_sigma']" in message
    other = from_pretrained(tmp_path / "hf", convert=["pred_sigma"])
    assert not other.config.pred_sigma

    given = inputs(model)
    both, half = model(**given), other(**given)
    assert half.shape == given["x"].shape and both.shape[1] == 6
    torch.testing.assert_close(half, both[:, :3])

    save_pretrained(other, tmp_path / "off")
    refused(
        "another model", from_pretrained, tmp_path / "off", pred_sigma=True, convert=["pred_sigma"]
    )


def test_position_tables_of_another_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = drawn("STDiT", **TABLE)
    torch.save(model.state_dict(), tmp_path / "v1.pth")
    options = {**SMALL, "input_size": (6, 6, 10), "space_scale": 1.0, "allow_pickle": True}
    differing, load = "pos_embed [1, 12, 24], not [1, 15, 24]", STDiT.from_pretrained
    message = refused(differing, load, tmp_path / "v1.pth", **options)

    assert "convert=['pos_embed']" in message
    with caplog.at_level(logging.INFO, "opensora_sp"):
        other = STDiT.from_pretrained(tmp_path / "v1.pth", convert=("pos_embed",), **options)
    assert "conversion pos_embed: pos_embed_temporal from [1, 4, 24] to [1, 6, 24]" in caplog.text

    fresh = drawn("STDiT", seed=9, **{**SMALL, "input_size": (6, 6, 10), "space_scale": 1.0})
    tables = {
        name: tensor for name, tensor in fresh.state_dict().items() if name.startswith("pos_embed")
    }
    fresh.load_state_dict({**model.state_dict(), **tables})
    given = inputs(fresh, 6, 6, 10)

    assert torch.equal(other(**given), fresh(**given))
    without = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("pos_embed")
    }
    torch.save(without, tmp_path / "bare.pth")  # as Open-Sora hands them on
    bare = STDiT.from_pretrained(
        tmp_path / "bare.pth", convert=["pos_embed"], allow_pickle=True, **TABLE
    )
    assert same(bare.state_dict(), model.state_dict())


def test_more_latent_channels(tmp_path: Path) -> None:
    """Each group of channels is predicted as the one before, from four equal groups."""
    model = drawn("STDiT3", **SMALL)
    save_pretrained(model, tmp_path / "hf")
    wider = dict(in_channels=12, use_cond=True)
    message = refused("x_embedder.proj.weight", from_pretrained, tmp_path / "hf", **wider)
    assert "convert=['in_channels']" in message

    other = from_pretrained(tmp_path / "hf", **wider, convert=["in_channels"])
    state = other.state_dict()
    assert torch.equal(state["x_embedder.proj.weight"][:, 3:6], model.x_embedder.proj.weight / 4)
    assert not state["x_embedder_cond.proj.weight"].any()

    given = inputs(model)
    alone = model(**given)  # velocity and variance
    given["x"] = given["x"].repeat(1, 4, 1, 1, 1)
    parts = [part.repeat(1, 4, 1, 1, 1) for part in alone.chunk(2, dim=1)]
    torch.testing.assert_close(other(**given), torch.cat(parts, dim=1))

    save_pretrained(other, tmp_path / "wide")
    # It cannot be halved or divided into groups that are no whole number.
    for channels in (6, 16):
        wrong = dict(in_channels=channels, convert=["in_channels"])
        refused("another model", from_pretrained, tmp_path / "wide", **wrong)


def test_conversions_have_an_order_of_their_own(tmp_path: Path) -> None:
    save_pretrained(drawn("STDiT3", **SMALL), tmp_path / "hf")
    several = [["pred_sigma", "in_channels"], ["in_channels", "pred_sigma"]]
    states = [
        from_pretrained(tmp_path / "hf", in_channels=12, convert=names).state_dict()
        for names in several
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    # The name of one, as well.
    wide = from_pretrained(tmp_path / "hf", in_channels=12, convert="in_channels")
    assert wide.config.in_channels == 12


def test_temporal_blocks_come_and_go(tmp_path: Path) -> None:
    """New ones contribute nothing at first: the model of images computes the same."""
    images = drawn("STDiT3", **SMALL, skip_temporal=True)
    assert not any(name.startswith("temporal") for name in images.state_dict())
    save_pretrained(images, tmp_path / "images")
    message = refused(
        "temporal_blocks.*", from_pretrained, tmp_path / "images", skip_temporal=False
    )
    assert "convert=['temporal_blocks']" in message

    windows = dict(kernel_size=(2, 2, -1), skip_temporal=False)
    wide = drawn("STDiT3", **{**SMALL, "hidden_size": 36}, skip_temporal=True)
    save_pretrained(wide, tmp_path / "wide")
    for options in (windows, dict(skip_temporal=False)):
        videos = from_pretrained(tmp_path / "wide", **options, convert=["temporal_blocks"])
        assert len(videos.temporal_blocks) == 2 and videos.temporal_blocks[0].attn.qkv.weight.any()
        given = inputs(wide)
        torch.testing.assert_close(videos(**given), wide(**given))

    save_pretrained(videos, tmp_path / "videos")
    options = dict(skip_temporal=True)
    refused("unexpected temporal_blocks.*", from_pretrained, tmp_path / "videos", **options)
    without = from_pretrained(tmp_path / "videos", **options, convert=["temporal_blocks"])
    assert same(without.state_dict(), wide.state_dict())
    with pytest.raises(ValueError, match=r"skip_temporal is .* convert=\['temporal_blocks'\]"):
        check_model_config(tmp_path / "wide", "STDiT3", videos.config)

    # A run that trains adapters, or samples, initializes nothing.
    weights = open_weights(tmp_path / "wide")
    with pytest.raises(ValueError, match="missing temporal_blocks"):
        fitted(weights, videos, convert=["temporal_blocks"])


# The way back.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", ["5GB", 3000])
def test_what_is_written_reads_back_bitwise(
    dtype: torch.dtype, size: str | int, tmp_path: Path
) -> None:
    model = drawn("STDiT2", **SMALL, qk_norm=True).to(dtype)
    model.x_embedder.proj.bias.data[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    model.save_pretrained(tmp_path / "out", max_shard_size=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))

    assert (len(files) > 5) == (size == 3000)
    plain: State = {}
    for file in files:
        plain |= load_file(file)
    assert same(plain, model.state_dict()) and plain["rope.freqs"].dtype == torch.float32

    read = STDiT2.from_pretrained(tmp_path / "out")
    assert same(read.state_dict(), model.state_dict()) and read.config == model.config
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    # As readable as any file written here.
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1


def test_nothing_is_overwritten_or_left_half_written(
    model: STDiT3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    model.save_pretrained(out)  # an empty folder
    refused("which is there already", model.save_pretrained, out)
    (tmp_path / "file").touch()
    refused("which is there already", model.save_pretrained, tmp_path / "file")
    save, many = model.save_pretrained, "5 apples"
    refused(f"got max_shard_size '{many}'", save, tmp_path / "a", max_shard_size=many)

    def full(*_: Any) -> None:
        assert list(tmp_path.glob(".partial-b/*.safetensors")) and not (tmp_path / "b").exists()
        raise OSError("no space left on device")

    monkeypatch.setattr("opensora_sp.checkpoint.pretrained.write_model_config", full)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path / "b")
    assert {p.name for p in tmp_path.iterdir()} == {"out", "file"}


# The command and the runs.


@pytest.mark.parametrize(
    ("script", "runs"), [("train", "cli.train.train"), ("inference", "cli.sample.sample")]
)
def test_the_scripts_pass_the_leave_to_read_pickles_on(
    script: str, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.py").write_text(
        SAMPLE if script == "inference" else TRAIN.format(manifest="none.csv")
    )
    started: list[Any] = []
    monkeypatch.setattr(f"opensora_sp.{runs}", lambda cfg, **_: started.append(cfg.allow_pickle))
    for flag in ([], ["--allow-pickle"]):
        monkeypatch.setattr("sys.argv", [script, str(tmp_path / "config.py"), *flag])
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    assert started == [False, True]


def convert(*arguments: object) -> None:
    main(["convert", *map(str, arguments)])


def test_convert_writes_a_folder(
    model: STDiT3, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.save(
        {"ema": model.state_dict(), "model": prefixed(model.state_dict())}, tmp_path / "a.pt"
    )
    options = [f"{key}={value}" for key, value in SMALL.items()]

    for extra in ((), ("--no-ema", "--dtype", "bf16", "--max-shard-size", "20000")):
        out = tmp_path / f"out{len(extra)}"
        model_of = ("--model", "STDiT3", "--allow-pickle", "--options", *options)
        convert(tmp_path / "a.pt", out, *model_of, *extra)
        dtype = "bfloat16" if extra else "float32"
        assert f"wrote STDiT3, 0.0 M parameters, torch.{dtype}" in capsys.readouterr().out

    assert same(load_file(tmp_path / "out0" / "model.safetensors"), model.state_dict())
    assert same(
        from_pretrained(tmp_path / "out5").state_dict(),
        from_pretrained(tmp_path / "out0", dtype=torch.bfloat16).state_dict(),
    )

    convert(tmp_path / "out0", tmp_path / "less", "--drop-sigma", "--text-length", 5)
    config = from_pretrained(tmp_path / "less").config
    assert (config.pred_sigma, config.model_max_length) == (False, 5)

    save_pretrained(drawn("STDiT", **TABLE), tmp_path / "v1")
    convert(tmp_path / "v1", tmp_path / "larger", "--input-size", 6, 6, 10)
    assert from_pretrained(tmp_path / "larger").pos_embed_temporal.shape[1] == 6


def test_convert_refuses_with_a_sentence(
    model: STDiT3, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.save(model.state_dict(), tmp_path / "a.pt")
    both = (tmp_path / "a.pt", tmp_path / "out")
    for arguments, message in [
        (both, "which is pickled"),
        ((*both, "--allow-pickle"), "without config.json"),
        ((tmp_path / "a.pt", tmp_path), "which is there already"),
        (
            (*both, "--allow-pickle", "--model", "STDiT3", "--options", "deph=2"),
            "did you mean 'depth'?",
        ),
        (
            (*both, "--allow-pickle", "--model", "STDiT3", "--options", "depth=2.5"),
            "got depth = 2.5 for STDiT3",
        ),
        (
            (*both, "--allow-pickle", "--options", "strict=False"),
            "got --options strict=...; expected a setting of the",
        ),
        ((*both, "--options", "path=a"), "got --options path=...; expected a setting of the model"),
    ]:
        with pytest.raises(SystemExit) as left:
            convert(*arguments)
        assert left.value.code == 2 and message in capsys.readouterr().err

    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_runs_start_from_foreign_weights(tmp_path: Path) -> None:
    """As far as their names and configuration go; the rest of a run is in the tests of runs."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    (tmp_path / "train.py").write_text(TRAIN.format(manifest="none.csv"))
    foreign = drawn("STDiT3", **{**SMALL, "model_max_length": 20})
    torch.save({"state_dict": foreign.state_dict()}, tmp_path / "a.pth")
    ask = ["allow_pickle=True", "convert=['y_embedding', 'pred_sigma']"]

    for options, message in [
        ([], "which is pickled"),
        (ask[:1], "convert=['y_embedding', 'pred_sigma']"),
        (ask, None),
    ]:
        train = load_train_config(tmp_path / "train.py", [f"load={tmp_path / 'a.pth'}", *options])
        sample = load_inference_config(
            tmp_path / "sample.py", [f"ckpt={tmp_path / 'a.pth'}", "prompts=['a']", *options]
        )
        place = sampling_preflight(sample)[1]
        if message:
            refused(message, check_initial_weights, train)
            refused(message, build_pipeline, sample, place, SequenceMesh(1), torch.device("cpu"))

    check_initial_weights(train)
    found = build_pipeline(sample, place, SequenceMesh(1), torch.device("cpu")).model.state_dict()
    state = foreign.state_dict()
    unchanged = {name: state[name] for name in state if found[name].shape == state[name].shape}

    assert same({name: found[name] for name in unchanged}, unchanged)
    assert len(found) - len(unchanged) == 3
    with pytest.raises(ValueError, match="got conversion 'all'"):
        load_train_config(tmp_path / "train.py", ["convert=['all']"])
