"""Configs: what is shipped loads and builds; what is wrong is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import pytest
import torch

from opensora_sp.config import (
    build_component,
    dump_config,
    load_inference_config,
    load_train_config,
)
from opensora_sp.config.components import check_options, split_type
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.process import Geometry
from opensora_sp.encoders.standins import PatchPoolVAE
from opensora_sp.models import build_model

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = [path for path in sorted(CONFIGS.rglob("*.py")) if path.parent.name != "_base_"]
SAMPLE = [path for path in ALL if path.parent.name == "inference" or path.stem == "sample"]
TRAIN = [path for path in ALL if path not in SAMPLE]
DEMO = CONFIGS / "demo" / "train.py"


@pytest.mark.parametrize("path", TRAIN + SAMPLE, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_config_loads_builds_on_meta_and_dumps_to_itself(path: Path, tmp_path: Path) -> None:
    load = load_train_config if path in TRAIN else load_inference_config
    cfg = load(path)
    name, options = split_type("model", cfg.model)
    with torch.device("meta"):
        model = build_model(name, **options)
    assert sum(p.numel() for p in model.parameters()) > 1e6
    (tmp_path / "config.py").write_text(dump_config(cfg))
    assert load(tmp_path / "config.py") == cfg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["optimiser.lr=1"], "unknown key 'optimiser'.*did you mean 'optimizer'. .--cfg-options"),
        (["optimizer.learning_rate=1"], "unknown key 'optimizer.learning_rate'; expected one of"),
        (["model.depth=abc"], "got model.depth = 'abc'; expected a valid integer; change"),
        (["model.depth=2.5"], "got model.depth = 2.5; expected a valid integer; change"),
        (["model.depth=0"], "got depth 0; expected a positive number"),
        (["grad_checkpoint=100"], "got grad_checkpoint=100; expected .* a number from 0 to 4,"),
        (["model.num_heads=0"], "got num_heads 0; expected a positive number"),
        (["model.patch_size=(2, 2)"], r"got model.patch_size = \(2, 2\); expected one more entry"),
        (["model.qk_norm=maybe"], "got model.qk_norm = 'maybe'; expected a valid boolean; change"),
        (["model.skip_y_embedder=True"], "got skip_y_embedder=True, for text that is projected"),
        (["model.type=3"], "got model without the name of a type"),
        (["vae.pool=4"], "got vae.pool = 4; expected a valid tuple; change vae.pool"),
        (["scheduler.cfg_scale=high"], "got scheduler.cfg_scale = 'high'; expected a valid number"),
        (["scheduler.num_sampling_steps=0"], "got scheduler.num_sampling_steps = 0; expected"),
        (["model.type=STDiT4"], "got model 'STDiT4'; expected one of"),
        (["vae.pol=4"], "unknown key 'vae.pol'.*did you mean 'pool'"),
        (["text_encoder.type=bert"], "got text_encoder.type 'bert'; expected one of"),
        (["sp_size=0"], "got sp_size = 0"),
        (["precision=fp64"], "expected 'fp32', 'bf16' or 'fp16' for training"),
        (["resolution=64x64"], "expected exactly one of them"),
        (["image_size=None", "resolution=big"], "expected 'HxW' or a number"),
        (["noequals"], "expected key=value"),
        (["sp_size.x=1"], "sp_size is 2; expected a dict there"),
        (["resume=auto"], "unknown key 'resume'; expected a known one; pass the option --resume"),
        (["optimizer.lr=1e999"], "got optimizer.lr = .*; expected a finite number; change"),
        (["scheduler.cfg_scale=1e999"], "got scheduler.cfg_scale = inf; expected a finite number"),
        (["vae.type=VideoAutoencoderKL"], r"key 'vae.pool'.*--cfg-options .vae=dict\(type="),
    ],
)
def test_mistakes_are_refused_by_name(options: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_train_config(DEMO, options)
    assert re.search(message, str(error.value).replace("\n", " ")), error.value


def test_a_config_of_the_other_kind_is_the_only_error(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"_base_ = {str(DEMO)!r}\noutputs = 'runs/first'\n")
    with pytest.raises(ValueError, match="is a training config; .*: here runs/first/sample.py$"):
        load_inference_config(tmp_path / "own.py")
    for path in SAMPLE:
        with pytest.raises(ValueError, match="is a sampling config; expected a training config;"):
            load_train_config(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["scheduler.cfg_scale=-1"], "expected a number greater than or equal to 0"),
        (["scheduler.cfg_scale=1e30"], "expected a number less than or equal to 1000"),
        (["scheduler.num_sampling_steps=1000000000"], "less than or equal to 100000"),
        (["fps=1e9"], "fps = 1000000000.0; expected a number less than or equal to 1000"),
        (["seed=1" + "0" * 30], "expected a number less than"),
        (["condition_frame_edit=1e999"], "expected a finite number"),
    ],
)
def test_numbers_of_a_sampling_have_bounds(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_inference_config(SAMPLE[0], options)


class Codec(Protocol):
    """A type that pydantic cannot check."""


class Custom:
    def __init__(self, size: int, codec: Codec | None = None, model_x: float = 1.0) -> None: ...


def test_options_of_a_custom_class_are_checked_together() -> None:
    assert check_options("vae", {"size": "3", "model_x": 2}, Custom) == {"size": 3, "model_x": 2.0}
    with pytest.raises(ValueError) as error:
        check_options("vae", {"sizes": 3, "model_x": "high"}, Custom)
    for message in (
        "got no vae.size; expected a value",
        "got the unknown key 'vae.sizes'; expected one of ['size', 'codec', 'model_x']; did you",
        "got vae.model_x = 'high'; expected a valid number",
    ):
        assert message in str(error.value)


def test_a_resolution_of_the_command_line_replaces_the_frame_size_of_the_config() -> None:
    named = ["image_size=None", "resolution=240p", "aspect_ratio=9:16"]
    for sized in ([], named):
        assert load_inference_config(SAMPLE[0], sized, {"resolution": "24x32"}).size == (24, 32)


@pytest.mark.parametrize("path", TRAIN + SAMPLE, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_timesteps_of_every_config_are_sound(path: Path) -> None:
    """Finite, falling from noise to data, and spread out while training."""
    cfg = (load_train_config if path in TRAIN else load_inference_config)(path)
    flow = build_component(cfg.scheduler, {"rflow": RectifiedFlow})
    frames = PatchPoolVAE().latent_size(cfg.num_frames, *cfg.size)[0]
    assert not flow.legacy_frame_count  # so latent frames count
    geometry = Geometry(*(torch.tensor([float(n)]) for n in (*cfg.size, frames)))
    sampled = torch.cat(flow.sampling_timesteps(1, geometry))
    assert sampled.isfinite().all() and (sampled.diff() < 0).all()
    assert sampled[0] == 1000 and sampled[-1] > 0
    drawn = flow.timesteps_from(torch.tensor([0.1, 0.5, 0.9]), geometry)
    assert (drawn.diff() > 1).all() and drawn.min() > 0 and drawn.max() < 1000


def test_files_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    for content, message in [
        ("_base_ = 'gone.py'", "FileNotFoundError"),
        ("sp_size = (", "SyntaxError"),
    ]:
        (tmp_path / "config.py").write_text(content)
        with pytest.raises(ValueError, match=rf"which cannot be loaded \({message}.*config.py:1\]"):
            load_train_config(tmp_path / "config.py")
    assert load_train_config(DEMO, ["scheduler.num_sampling_steps=5"]).scheduler["type"] == "rflow"
    assert load_train_config(DEMO, ["model.qk_norm='False'"]).model["qk_norm"] is False


def test_a_missing_config_is_named() -> None:
    with pytest.raises(ValueError, match=r"got config 'nowhere.py', which is not a file"):
        load_train_config("nowhere.py")
    with pytest.raises(ValueError, match=r"expected a .py config; did you mean 'train.py'\?"):
        load_train_config(DEMO.with_name("trainn.py"))
    with pytest.raises(ValueError, match=r"pass a file of this folder: first.py, sample.py, tr"):
        load_train_config(DEMO.parent)
