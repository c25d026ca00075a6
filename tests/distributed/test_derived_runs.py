"""Runs of a derived model by config: its further inputs come from files to every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from derived_models import STREET, WORLD, with_package, write_derived
from runs import BIN, ROOT, TRAIN, losses, run_forked

from opensora_sp.cli import main
from opensora_sp.config import load_either, load_inference_config, load_train_config
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.data.cache import CachedFeatures
from opensora_sp.data.dataset import ClipShape, CorruptSample, Sample
from opensora_sp.data.video import read_video
from opensora_sp.encoders.standins import PatchPoolVAE
from opensora_sp.features.build import make_dataset
from opensora_sp.features.cached import check_cache
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import check_requests, requests_of
from opensora_sp.training.sp_verification import small_batch, small_model, small_shape

STREET_OPTIONS = "map_channels=2, box_size=4,"


def run(folder: Path, script: str, *arguments: str | Path, ranks: int) -> str:
    done = run_forked(
        folder / "start.py", ROOT / "scripts" / script, *arguments, ranks=ranks, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_training_and_sampling_by_config(tmp_path: Path) -> None:
    """The losses of two ranks that share batches are those of one; the files matter; it resumes."""
    manifest = write_derived(tmp_path, WORLD, "action_size=3,")
    validation = f"validation=dict(every=2, manifest={str(manifest)!r}, bins=2)"

    def train(outputs: str, steps: int, sp_size: int, *more: str) -> list[float]:
        options = [f"outputs={tmp_path / outputs}", f"max_steps={steps}", "ckpt_every=1"]
        options += [f"sp_size={sp_size}", validation, "grad_checkpoint=False", *more]
        options += ["optimizer.lr=0.01", "warmup_steps=0"]
        arguments = [tmp_path / "train.py", "--resume", "auto", "--cfg-options", *options]
        run(tmp_path, "train.py", *arguments, ranks=sp_size)
        return losses(tmp_path / outputs)

    alone, shared = train("one", 3, 1), train("two", 1, 2)
    shared = train("two", 3, 2, "num_workers=1")
    assert len(alone) == len(shared) == 3
    np.testing.assert_allclose(shared, alone, rtol=5e-4)

    cache = tmp_path / "cache"
    run(tmp_path, "precompute.py", tmp_path / "train.py", "-o", cache, ranks=2)
    of_cache = f"dataset=dict(_delete_=True, type='CachedFeatures', path={str(cache)!r})"
    np.testing.assert_allclose(train("cached", 3, 2, of_cache), alone, rtol=5e-4)

    first = sorted((tmp_path / "clips").glob("*-0.npy"))
    inputs = {path.name.removesuffix("-0.npy"): str(path) for path in first}
    prompts = f"prompts=[dict(prompt='a', seed=1, inputs={inputs})]"
    videos = []
    for ranks in (1, 2):
        outputs = tmp_path / f"samples-{ranks}"
        options = [f"outputs={outputs}", f"sp_size={ranks}", prompts, "scheduler.cfg_scale=2.0"]
        arguments = [tmp_path / "sample.py", "--ckpt", tmp_path / "two", "--cfg-options", *options]
        run(tmp_path, "inference.py", *arguments, ranks=ranks)
        videos.append(torch.from_numpy(read_video(next(outputs.glob("*.mp4")), num_frames=5)[0]))
        facts = json.loads(next(outputs.glob("*a.json")).read_text())
        assert facts["inputs"] == inputs
    assert (videos[0].float() - videos[1].float()).abs().mean() < 1

    # The recorded config is data, which may not name what is imported.
    validated = tmp_path / "two" / "step_00000002"
    command = ["eval", validated, "--manifest", manifest, "--bins", "2", "--seeds", "1"]
    without = run_forked(tmp_path / "start.py", BIN / "opensora-sp", *command)
    assert "pass the run's own config with --config CONFIG" in without.stderr
    command += ["--config", tmp_path / "train.py", "--output", tmp_path / "eval.json"]
    evaluated = run_forked(tmp_path / "start.py", BIN / "opensora-sp", *command, ranks=2)
    assert evaluated.returncode == 0, evaluated.stderr
    (bucket,) = json.loads((tmp_path / "eval.json").read_text())["buckets"]
    lines = (tmp_path / "two" / "validation.jsonl").read_text().splitlines()
    found = [one["mean"] for one in bucket["bins"]]
    assert json.loads(lines[-1])["step"] == 2
    np.testing.assert_allclose(found, json.loads(lines[-1])["loss_by_bin"], rtol=1e-4)

    for path in first:
        np.save(path, np.load(path) + 2)
    # The first step changes the final layer alone, which is zero before, the second one the layers
    # that are zero at first in the derived model.
    others = train("other", 3, 1)
    assert others[:2] == alone[:2] and others[2] != alone[2]


def header(text: str) -> bytes:
    """An ``.npy`` file with this header and nothing else."""
    line = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line.encode()


def refused(folder: Path) -> None:
    manifest = write_derived(folder)
    cfg = load_train_config(folder / "train.py")
    dataset = make_dataset(cfg)
    shape = ClipShape(5, 28, 24)

    # The actions are those of the frames; the reader of a clip's first frame reads them.
    actions = np.load(folder / "clips/actions-3.npy").astype(np.float32)
    clip = dataset[Sample(3, 0, shape)]
    assert torch.equal(clip.extra["actions"], torch.from_numpy(actions[0:5]))
    assert not dataset[Sample(3, 0, shape, frames=(1, 3))].extra
    every_second = dataset.extra.read({"actions": folder / "clips/actions-3.npy"}, (3, 28, 24))
    assert every_second["actions"].shape == (3, 3)
    cut = dataset.extra.read(
        {"actions": folder / "clips/actions-3.npy"}, (3, 28, 24), start=2, interval=3
    )
    assert torch.equal(cut["actions"], torch.from_numpy(actions[[2, 5, 8]]))

    broken: list[tuple[object, str]] = [
        (b"no array", "magic string"),
        # Headers whose errors are those of Python's tokenizer and compiler.
        (header("{'descr': 'f4,(', 'fortran_order': False, 'shape': (9, 3)}"), "no array as"),
        (np.zeros((4, 3)), "has shape [4, 3], of which the clip has [4, 3], and actions [5, 3]"),
        (np.full((9, 3), np.nan), "not finite"),
        (np.full((9, 3), "a"), "no array of numbers"),
    ]
    path = folder / "clips/actions-0.npy"
    for content, reason in broken:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        item = dataset[Sample(0, 0, shape)]
        assert isinstance(item, CorruptSample)
        assert reason in item.reason, item.reason

    before = dataset.fingerprint
    manifest.write_text(manifest.read_text().replace("actions-1.npy", "actions-2.npy"))
    assert make_dataset(cfg).fingerprint != before
    for old, new, message in [
        ("actions-1.npy", "", "without actions for clip 2; expected a file"),
        (",actions\n", ",action\n", "expected path and text and actions; add actions"),
    ]:
        text = manifest.read_text().replace("actions-2.npy\n2", "actions-1.npy\n2")
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            make_dataset(cfg)
        manifest.write_text(text)

    def requests(*options: str) -> None:
        sampling = load_inference_config(folder / "sample.py", list(options))
        check_requests(sampling, requests_of(sampling))

    whole = np.load(folder / "clips/actions-4.npy").astype(np.float32)
    long = [f"prompts=[dict(prompt='a', inputs='actions={folder}/clips/actions-4.npy')]"]
    long.append("condition_frame_length=2")
    requests(*long)
    for options, message in [
        (["prompts=['a']"], r"got inputs \[\] for 'a'; expected files of \['actions'\]"),
        ([f"prompts=[dict(prompt='a', inputs=dict(actions='{path}'))]"], "cannot be read"),
        ([*long, "loop=3"], r"for the frames from 6 on \(.* the clip has \[3, 3\], and actions"),
    ]:
        with pytest.raises(ValueError, match=message):
            requests(*options)

    # The second loop repeats two frames of the first.
    requests(*long, "loop=2")
    sampling = load_inference_config(folder / "sample.py", [*long, "loop=2"])
    fake = SimpleNamespace(cfg=sampling, vae=PatchPoolVAE((1, 4, 4)), device="cpu")
    for loop, start in enumerate((0, 3)):
        found = Pipeline._extra_inputs(fake, requests_of(sampling), loop)["actions"]
        assert torch.equal(found[0], torch.from_numpy(whole[start : start + 5]))


def refused_in_loops(folder: Path) -> None:
    """A map of latent frames belongs to one loop."""
    write_derived(folder, STREET, STREET_OPTIONS)
    inputs = {name: str(folder / f"clips/{name}-0.npy") for name in ("map", "boxes")}
    options = [f"prompts=[dict(prompt='a', inputs={inputs})]", "condition_frame_length=2"]
    for loop in (1, 2):
        cfg = load_inference_config(folder / "sample.py", [*options, f"loop={loop}"])
        if loop == 1:
            check_requests(cfg, requests_of(cfg))
        else:
            with pytest.raises(ValueError, match="got loop 2 with the input map of axes .*set"):
                check_requests(cfg, requests_of(cfg))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with_package(tmp_path, refused, tmp_path)
    with_package(tmp_path, refused_in_loops, tmp_path / "street")


def cached(folder: Path) -> None:
    """A cache has the inputs of the first frame's reader, and belongs to their names and sizes."""
    cfg = load_train_config(folder / "train.py")
    files, cache = make_dataset(cfg), CachedFeatures(str(folder / "cache"), cfg.extra_files)
    check_cache(cfg, cache)
    shape = ClipShape(5, 28, 24)
    for clip in cache.known(shape).tolist():
        kept, read = cache[Sample(clip, 0, shape)], files[Sample(clip, 0, shape)]
        assert kept.extra.keys() == {"actions"}
        assert torch.equal(kept.extra["actions"], read.extra["actions"])
        assert not cache[Sample(clip, 0, shape, frames=(1, 3))].extra
    assert len(cache.known(shape)) == 6

    for change, message in (
        ({"model": cfg.model | {"action_size": 4}}, "'frames 4'.*there .*'frames 3'"),
        ({"dataset": cfg.dataset.model_copy(update={"manifest": str(changed(folder))})},
         "got dataset.manifest actions"),
        ({"model": {"type": "STDiT3"}}, "model.extra_inputs None .there .*'actions'"),
    ):  # fmt: skip
        other = cfg.model_copy(update=change)
        with pytest.raises(ValueError, match=message):
            check_cache(other, cache)


def changed(folder: Path) -> Path:
    """The manifest with the actions of another clip."""
    text = (folder / "clips" / "clips.csv").read_text()
    path = folder / "clips" / "other.csv"
    path.write_text(text.replace("actions-1.npy", "actions-2.npy"))
    return path


def test_a_feature_cache_keeps_further_inputs(tmp_path: Path) -> None:
    write_derived(tmp_path)
    arguments = [tmp_path / "train.py", "-o", tmp_path / "cache"]
    run(tmp_path, "precompute.py", *arguments, ranks=2)
    with_package(tmp_path, cached, tmp_path)


def planned(folder: Path) -> None:
    """The planner and verify pass as many actions as the video has frames."""
    write_derived(folder)
    # Five frames have three of latents.
    options = ["vae.pool=[2,4,4]", "precision='bf16'", "grad_checkpoint=0"]
    cfg = load_train_config(folder / "train.py", options)
    cls, seen = cfg.model_spec.model_class, []
    embed = cls.embed_frames

    def noted(self: Any, extra: Any, num_frames: int) -> torch.Tensor:
        seen.append((tuple(extra["actions"].shape), num_frames))
        return embed(self, extra, num_frames)

    cls.embed_frames = noted
    run = RunEstimator(cfg, 2, device="cpu")
    latents = run.latents(BatchSpec(3, 5, (28, 24)))
    run.activations(latents, 2, 0)
    assert run.estimate(latents, 2).seconds > 0
    assert seen and set(seen) == {((3, 5, 3), 3)}

    shape = small_shape(cfg, 2, 512)
    model = small_model(cfg, 1, shape)
    model(**small_batch(model, shape, cfg.num_frames))
    assert seen[-1] == ((shape[0], 5, 3), 3)

    main(["plan", str(folder / "train.py"), "--gpus", "2", "--cfg-options", *options])


def test_plans_have_an_input_of_each_frame(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_package(tmp_path, planned, tmp_path)
    assert WORLD in (text := capsys.readouterr().out) and "GB at the peak" in text


def test_classes_are_imported_by_config_files_alone(tmp_path: Path) -> None:
    manifest = write_derived(tmp_path)
    with pytest.raises(ValueError, match=r"model.type 'my_package.*cannot be imported"):
        load_either(tmp_path / "train.py", [])

    plain = tmp_path / "plain.py"
    plain.write_text(TRAIN.format(manifest=str(manifest)))
    override = [f"model.type={WORLD}"]
    with pytest.raises(ValueError, match="model.type 'my_package.* importing a class is not allow"):
        load_train_config(plain, override)
    with pytest.raises(ValueError, match="which is <class .*derived from one of"):
        plain.write_text(plain.read_text().replace('"STDiT3"', '"pathlib.Path"'))
        load_train_config(plain)
    assert "my_package.world" not in sys.modules
