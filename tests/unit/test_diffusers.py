"""The pipeline of diffusers: the sampler's latents, its folder, its arguments, refused mistakes."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig, get_peft_model
from PIL import Image
from random_weights import draw_weights
from runs import CURVE, write_random_model
from torch import Tensor

from opensora_sp.cli import main
from opensora_sp.common.importing import PackageError
from opensora_sp.config import load_inference_config
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.process import Geometry
from opensora_sp.encoders.huggingface import ImageVAE
from opensora_sp.integrations.diffusers import OpenSoraPipeline, OpenSoraScheduler, write_pipeline
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import Request, requests_of
from opensora_sp.sampling.run import build_pipeline

SIZE = dict(num_frames=5, height=28, width=24)
PROMPTS = ["a red circle", "a long caption of a blue square"]
V13 = (
    "model.use_cond=True",
    "model.kernel_size=[2,2,-1]",
    "model.use_spatial_rope=True",
    "model.hidden_size=36",
)
V13_FLOW = dict(
    image_cfg_scale=3.0, use_oscillation_guidance=True, force_num=1, scale_image_weight=True
)
TRANSFORM = dict(use_timestep_transform=True, transform_scale=4.0)


def folder_of(folder: Path, scheduler: dict[str, Any], *options: str) -> Path:
    """Weights drawn at random, their config and, as ``convert`` writes it, their pipeline."""
    write_random_model(folder, *options)
    with (folder / "sample.py").open("a") as file:
        for option in options:
            key, _, value = option.partition("=")
            file.write(f"model[{key.removeprefix('model.')!r}] = {value}\n")
        file.write(f"scheduler.update({scheduler})\n")
    sample = str(folder / "sample.py")
    main(["convert", str(folder), str(folder / "pipe"), "--to", "diffusers", "--config", sample])
    return folder


@pytest.fixture(scope="module")
def v12(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("v12"), TRANSFORM | {"cache_curve": CURVE})


@pytest.fixture(scope="module")
def v13(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("v13"), TRANSFORM | V13_FLOW, *V13)


def loaded(folder: Path, **options: Any) -> OpenSoraPipeline:
    pipeline = OpenSoraPipeline.from_pretrained(folder / "pipe", **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sampled(folder: Path, prompts: list[Any], **values: Any) -> tuple[Tensor, Tensor]:
    """Noise and latents of our sampler for the prompts of a config."""
    cfg = load_inference_config(folder / "sample.py", values=values | {"prompts": prompts})
    pipeline = build_pipeline(cfg, folder, SequenceMesh(1), torch.device("cpu"))
    requests = requests_of(cfg)
    return noise_of(pipeline, requests), pipeline.looped(requests)[0]


def noise_of(pipeline: Pipeline, requests: list[Request]) -> Tensor:
    shape = (pipeline.vae.channels, *pipeline.vae.latent_size(*requests[0].shape))
    return torch.stack([request.noise(shape, "sample", loop=0) for request in requests])


def written_image(folder: Path, height: int = 40, width: int = 30) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return folder / "image.png"


# Prompts, their negative prompt, whether an image begins the videos, the guidance scale.
CASES: dict[str, tuple[list[str], str | None, bool, float]] = {
    "one prompt": (PROMPTS[:1], None, False, 4.0),
    "two prompts, negative": (PROMPTS, "a yellow background", False, 6.0),
    "two prompts, an image": (PROMPTS, None, True, 4.0),
    "without guidance, an image": (PROMPTS[1:], None, True, 1.0),
    "cached steps, an image": (PROMPTS, None, True, 4.0),
}
# Of three steps, the second reuses the residual of the first, and the last has no guidance.
LESS = dict(guidance_interval=(0.6, 1.0), cache_threshold=0.5)


@pytest.mark.parametrize("case", CASES)
def test_latents_are_those_of_our_sampler(v12: Path, tmp_path: Path, case: str) -> None:
    prompts, negative, has_image, scale = CASES[case]
    image = written_image(tmp_path)
    values: dict[str, Any] = {"scheduler.cfg_scale": scale, "scheduler.num_sampling_steps": 3}
    less: dict[str, Any] = LESS if "cached" in case else {}
    values |= {f"scheduler.{name}": setting for name, setting in less.items()}
    given = {"reference_path": str(image)} if has_image else {}
    asked = [{"prompt": one, "negative_prompt": negative, **given} for one in prompts]
    noise, wanted = sampled(v12, asked, **values)

    found = loaded(v12)(
        prompts,
        Image.open(image) if has_image else None,
        **SIZE,
        num_inference_steps=3,
        guidance_scale=scale,
        negative_prompt=negative,
        fps=8.0,
        latents=noise,
        output_type="latent",
        **less,
    ).frames
    assert wanted.abs().max() > 0.1 and (wanted - noise).abs().max() > 0.1
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("has_image", [False, True])
def test_latents_of_open_sora_1_3(v13: Path, tmp_path: Path, has_image: bool) -> None:
    """Conditioning frames beside the input, with the guidance of their own that the folder has."""
    image = written_image(tmp_path)
    values = {"cond_type": "i2v_head", "batch_size": 1} if has_image else {}
    given = {"reference_path": str(image)} if has_image else {}
    noise, wanted = sampled(v13, [{"prompt": PROMPTS[0], **given}], **values)

    pixels = np.asarray(Image.open(image))
    result = loaded(v13)(
        PROMPTS[0],
        torch.from_numpy(pixels).permute(2, 0, 1) / 255 if has_image else None,
        **SIZE,
        fps=8.0,
        latents=noise,
        output_type="latent",
        return_dict=False,
    )
    assert (result[0] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_diffusers_own_step_takes_the_same_path() -> None:
    """A loop of diffusers around a velocity, by the sizes of a video, against our sampler."""
    flow = RectifiedFlow(num_sampling_steps=7, **TRANSFORM)
    geometry = Geometry(*(torch.tensor([float(n)]) for n in (240, 426, 15)))
    z = torch.randn(1, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, t: Tensor, _: Tensor | None = None) -> Tensor:
        return x.sin() * (1 + t / 1000)

    scheduler = OpenSoraScheduler.of(dict(type="rflow", num_sampling_steps=30, **TRANSFORM))
    plain = FlowMatchEulerDiscreteScheduler()
    plain.set_timesteps(sigmas=scheduler.sigmas(7, geometry=geometry))
    x = z
    for t in plain.timesteps:
        x = plain.step(-velocity(x, t), t, x).prev_sample
    wanted = flow.sample(velocity, z, geometry=geometry)
    assert (x - wanted).abs().max() < 1e-5 and (wanted - z).abs().max() > 0.1


def test_a_folder_is_read_and_written_again(v12: Path, tmp_path: Path) -> None:
    pipeline = loaded(v12)
    pipeline.save_pretrained(tmp_path / "again")
    files = {path.relative_to(v12 / "pipe") for path in (v12 / "pipe").rglob("*")}
    assert files == {
        path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*")
    }
    assert files >= {
        Path("model_index.json"),
        Path("scheduler/scheduler_config.json"),
        Path("transformer/config.json"),
        Path("transformer/model.safetensors"),
    }
    index = json.loads((tmp_path / "again" / "model_index.json").read_text())
    assert index == json.loads((v12 / "pipe" / "model_index.json").read_text())
    for module, name in (index["transformer"], index["vae"], index["scheduler"]):
        assert hasattr(sys.modules[module], name)

    again = OpenSoraPipeline.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16 and again.scheduler.flow.transform_scale == 4.0
    assert again.to(torch.float64).dtype == torch.float64
    own, stored = (one.transformer.x_embedder.proj.weight for one in (again, pipeline))
    assert torch.equal(own, stored.bfloat16().double())


def test_adapters_are_loaded_weighted_fused_and_unloaded(v12: Path, tmp_path: Path) -> None:
    """Each state equals the weights of ``from_pretrained(lora=...)``, bit by bit."""
    for seed, name in enumerate(("one", "two")):
        config = LoraConfig(r=2, target_modules=["qkv", "fc1"], use_dora=bool(seed))
        theirs = get_peft_model(loaded(v12).transformer, config)
        draw_weights(theirs, seed=seed).save_pretrained(str(tmp_path / name))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    def holds(*sources: str) -> bool:
        expected = loaded(v12, lora=sources).transformer.state_dict()
        state = pipeline.transformer.state_dict()
        return all(torch.equal(tensor, expected[name]) for name, tensor in state.items())

    pipeline = loaded(v12)
    assert holds() and not holds(one)
    pipeline.load_lora_weights(one, adapter_name="one")
    assert holds(one)
    pipeline.load_lora_weights(f"{two}:0.5")
    assert pipeline.get_active_adapters() == ["default_1"] and holds(f"{two}:0.5")
    pipeline.set_adapters(["one", "default_1"], [0.25, 3.0])
    assert holds(f"{one}:0.25", f"{two}:1.5")
    assert pipeline.get_list_adapters() == {"transformer": ["one", "default_1"]}
    pipeline.unload_lora_weights()
    assert holds() and not pipeline.get_active_adapters()

    pipeline.load_lora_weights(one)
    pipeline.fuse_lora(lora_scale=0.5)
    pipeline.unload_lora_weights()
    assert holds(f"{one}:0.5")

    pipeline.load_lora_weights(one, adapter_name="default_1")
    pipeline.load_lora_weights(two)
    assert pipeline.get_active_adapters() == ["default_2"]
    pipeline.unload_lora_weights()

    pipeline.load_lora_weights(one, adapter_name="one")
    for call, message in (
        (lambda: pipeline.set_adapters("on"), "got adapter 'on'; expected.*did you mean 'one'"),
        (lambda: pipeline.set_adapters("one", [1, 2]), "got 2 adapter_weights.*expected one"),
        (lambda: pipeline.set_adapters(["one", "one"]), "'one', 'one'.*; expected each once"),
        (lambda: pipeline.set_adapters("one", float("nan")), "got the scale nan.*finite number"),
        (lambda: pipeline.load_lora_weights(two, adapter_name="one"), "'one' twice; expected a"),
        (lambda: pipeline.load_lora_weights(v12), "no adapter_config.json.*expected"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_arguments_and_outputs(v12: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = loaded(v12)
    seen: list[tuple[int, float]] = []

    def stop(
        pipe: Any, step: int, timestep: Tensor, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        assert pipe is pipeline
        seen.append((step, float(timestep)))
        return {"latents": torch.zeros_like(values["latents"])} if step == 1 else {}

    def call(**values: Any) -> Any:
        return pipeline(PROMPTS, **(SIZE | dict(num_inference_steps=2) | values)).frames

    image = np.zeros((10, 20, 3), np.uint8)
    with caplog.at_level("WARNING", logger="opensora_sp"):
        emptied = call(image=image, callback_on_step_end=stop, output_type="latent")
    assert not emptied.any() and [step for step, _ in seen] == [0, 1]
    first, second = (timestep for _, timestep in seen)
    assert first == pytest.approx(1000) and 0 < second < 450  # shifted, for such small videos
    assert "an image of 10x20 pixels is resized and cropped to 28x24" in caplog.text

    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    first = call(generator=generators, output_type="np")
    assert first.shape == (2, 5, 28, 24, 3) and 0 <= first.min() < first.max() <= 1
    again = call(generator=torch.Generator().manual_seed(1), output_type="pt")
    assert again.shape == (2, 5, 3, 28, 24)
    np.testing.assert_array_equal(first[0], again[0].permute(0, 2, 3, 1).numpy())
    assert not np.array_equal(first[1], again[1].permute(0, 2, 3, 1).numpy())
    videos = call(generator=torch.Generator().manual_seed(1))
    assert [len(video) for video in videos] == [5, 5]
    np.testing.assert_allclose(np.asarray(videos[0][4]) / 255, first[0, 4], atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (dict(prompt=[]), r"got \[\] as prompt; expected a text, or a list with one"),
    "a number as prompt": (dict(prompt=[3]), r"got \[3\] as prompt; expected a text"),
    "output type": (dict(output_type="mp4"), r"got output_type 'mp4'; expected one of \('pil'"),
    "image": (
        dict(image=np.zeros((8, 8), np.uint8)),
        r"got ndarray uint8 \(8, 8\) as image; expected a PIL image",
    ),
    "scaled image": (
        dict(image=torch.full((3, 8, 8), -1.0)),
        "as image; expected .* in \\[0, 1\\]; convert it",
    ),
    "images": (dict(image=[None]), "got 1 of image for 2 prompts; expected one for all"),
    "generators": (
        dict(generator=[torch.Generator()]),
        "got 1 of generator for 2 prompts; expected one for all, or one for each; pass as many",
    ),
    "a seed as generator": (
        dict(generator=7),
        r"got 7 as generator; expected a torch.Generator, .*; write .*manual_seed\(SEED\)",
    ),
    "seeds as generators": (dict(generator=[torch.Generator(), 7]), "got 7 as generator; expected"),
    "latents": (
        dict(latents=torch.zeros(2, 3, 5, 7, 7)),
        r"got latents \[2, 3, 5, 7, 7\]; expected noise \[2, 3, 5, 7, 6\] for 2 videos",
    ),
    "interval": (dict(guidance_interval=(1, 0)), r"got guidance_interval \(1.0, 0.0\); expected"),
    "steps": (dict(num_inference_steps=0), "got scheduler.num_sampling_steps = 0; expected"),
    "size": (dict(height=0), r"got a frame size of \(0, 24\); expected positive numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(v12: Path, name: str) -> None:
    values, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        loaded(v12)(**(dict(prompt=PROMPTS) | SIZE | values))


def test_an_older_diffusers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opensora_sp.integrations.diffusers"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.37.1")
    wanted = "^got diffusers 0.37.1; expected 0.38 or newer; pip install 'diffusers>=0.38'$"
    with pytest.raises(PackageError, match=wanted):
        importlib.import_module(name)


def test_other_folders_and_schedulers(v12: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model_index.json; expected .*; write one with"):
        OpenSoraPipeline.from_pretrained(v12)
    with pytest.raises(ValueError, match=r"got 'unet'; expected some of \['dtype', .*; remove it"):
        OpenSoraPipeline.from_pretrained(v12 / "pipe", unet=None)
    with pytest.raises(ValueError, match="got 'torch_dtype'; .*; did you mean 'dtype'"):
        OpenSoraPipeline.from_pretrained(v12 / "pipe", torch_dtype=torch.bfloat16)

    index = json.loads((v12 / "pipe" / "model_index.json").read_text())
    for change, message in (
        ({"_class_name": "LattePipeline"}, "of 'LattePipeline'; expected 'OpenSoraPipeline'"),
        ({"vae_config": {"type": "os.system"}}, r"got vae_config.type 'os.system' in .*; expected"),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps(index | change))
        with pytest.raises(ValueError, match=message):
            OpenSoraPipeline.from_pretrained(tmp_path, transformer=1, text_encoder=1, scheduler=1)

    # Of an object that is passed, its class counts and not what the folder names.
    whole = tmp_path / "whole"
    shutil.copytree(v12 / "pipe", whole)
    named = {"vae_config": {"type": "evil.Module"}}
    (whole / "model_index.json").write_text(json.dumps(index | named))
    passed = OpenSoraPipeline.from_pretrained(whole, vae=loaded(v12).vae)
    assert passed.config.vae_config["type"].startswith("opensora_sp.")

    pipeline = loaded(v12)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match="got the scheduler FlowMatch.*; expected OpenSoraSch"):
        pipeline("a", **SIZE)
    with pytest.raises(ValueError, match="got scheduler.type 'iddpm' .*; expected 'rflow'"):
        OpenSoraScheduler.of(dict(type="iddpm"))


def test_encoders_are_copied_with_their_weights_and_options(v12: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 16),
        latent_channels=3,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained(tmp_path / "source" / "vae")
    vae = dict(
        type="VideoAutoencoderKL",
        from_pretrained=str(tmp_path / "source"),
        subfolder="vae",
        micro_batch_size=2,
    )
    model = loaded(v12)
    write_pipeline(
        tmp_path / "pipe",
        model.transformer,
        vae=vae,
        text_encoder=model.config.text_encoder_config,
        scheduler=model.scheduler,
    )
    wanted = ImageVAE(str(tmp_path / "source"), subfolder="vae").state_dict()
    shutil.rmtree(tmp_path / "source")

    pipeline = loaded(tmp_path)
    found = pipeline.vae.state_dict()
    assert found.keys() == wanted.keys() and pipeline.vae.micro_batch_size == 2
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "source" not in (tmp_path / "pipe" / "model_index.json").read_text()
    videos = pipeline("a", **SIZE, num_inference_steps=1, output_type="pt").frames
    assert videos.shape == (1, 5, 3, 28, 24)

    pipeline.save_pretrained(tmp_path / "again")
    again = OpenSoraPipeline.from_pretrained(tmp_path / "again", transformer=pipeline.transformer)
    assert all(torch.equal(again.vae.state_dict()[name], wanted[name]) for name in wanted)
