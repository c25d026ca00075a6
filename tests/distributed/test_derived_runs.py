"""Runs of a derived model by config: its further inputs come from files to every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from derived_models import STREET, WORLD, with_package, write_derived
from runs import ROOT, TRAIN, losses, run_forked

from opensora_sp.config import load_either, load_inference_config, load_train_config
from opensora_sp.data import ClipShape, CorruptSample, Sample
from opensora_sp.data.video import read_video
from opensora_sp.features.build import make_dataset
from opensora_sp.features.precompute import check_reproducible
from opensora_sp.sampling.requests import check_requests, requests_of

STREET_OPTIONS = "map_channels=2, box_size=4,"


def run(folder: Path, script: str, *arguments: str | Path, ranks: int) -> str:
    done = run_forked(
        folder / "start.py", ROOT / "scripts" / script, *arguments, ranks=ranks, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"), [(WORLD, "action_size=3,"), (STREET, STREET_OPTIONS)], ids=["world", "street"]
)
def test_training_and_sampling_by_config(tmp_path: Path, name: str, own: str) -> None:
    """The losses of two ranks that share batches are those of one; the files matter; it resumes."""
    manifest = write_derived(tmp_path, name, own)
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
        (b"", "magic string"),
        (b"no array", "magic string"),
        # Headers whose errors are those of Python's tokenizer and compiler.
        (header("{'descr': ("), "no array as np.save writes one"),
        (header("{'descr': 'f4,(', 'fortran_order': False, 'shape': (9, 3)}"), "no array as"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}"), "no array as"),
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
        ("actions-1.npy", "", "1 clips without actions, clip 2 is the first"),
        (",actions\n", ",action\n", "expected path and text and actions; add actions"),
    ]:
        text = manifest.read_text().replace("actions-2.npy\n2", "actions-1.npy\n2")
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            make_dataset(cfg)
        manifest.write_text(text)

    with pytest.raises(ValueError, match="CachedFeatures' for the model .* takes \\['actions'\\]"):
        options = ["dataset=dict(_delete_=True, type='CachedFeatures', path='x')"]
        load_train_config(folder / "train.py", options)
    with pytest.raises(ValueError, match="to make a feature cache for"):
        check_reproducible(cfg)

    def requests(*options: str) -> None:
        sampling = load_inference_config(folder / "sample.py", list(options))
        check_requests(sampling, requests_of(sampling))

    requests(f"prompts=[dict(prompt='a', inputs='actions={folder}/clips/actions-4.npy')]")
    for options, message in [
        (["prompts=['a']"], r"got inputs \[\] and loop 1 for 'a'; expected files of \['actions'\]"),
        ([f"prompts=[dict(prompt='a', inputs=dict(actions='{path}'))]"], "cannot be read"),
        (
            [f"prompts=[dict(prompt='a', inputs=dict(actions='{path}'))]", "loop=2"],
            "loop=1 with such",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            requests(*options)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with_package(tmp_path, refused, tmp_path)


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
