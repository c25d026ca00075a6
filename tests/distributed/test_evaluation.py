"""``opensora-sp eval``: held-out losses by bucket and timestep on any number of processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed_clips import BUCKETS
from mixed_clips import TRAIN as TRAIN_BUCKETS
from ranks import run_ranks
from runs import BIN, TRAIN, run_forked, write_toy_set

from opensora_sp.config import load_train_config
from opensora_sp.evaluation.evaluate import (
    BucketLoss,
    Estimate,
    Evaluation,
    Settings,
    compared_settings,
    preflight,
)
from opensora_sp.training.metrics import read_lines
from opensora_sp.training.preflight import preflight as preflight_training
from opensora_sp.training.trainer import Trainer

BINS = 3


def train(config: Path) -> None:
    from opensora_sp.plugin import current_device, launch

    launch(0)
    cfg = load_train_config(config)
    dataset, _ = preflight_training(cfg, None)
    Path(cfg.outputs).mkdir(exist_ok=True)
    Trainer(cfg, dataset, None, current_device()).train(Path(cfg.outputs))
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with the held-out loss of its weights."""
    return write_run(tmp_path_factory.mktemp("evaluated"))


def write_run(folder: Path, *lines: str) -> Path:
    held = write_toy_set(folder / "held", 5, broken=(1,))
    config = TRAIN.format(manifest=str(write_toy_set(folder / "set", 7)))
    config += f"max_steps = 2\nckpt_every = 2\noutputs = {str(folder / 'run')!r}\n"
    config += f"validation = dict(every=2, manifest={str(held)!r}, bins={BINS}, use_ema=False)\n"
    config += "\n".join(lines)
    (folder / "train.py").write_text(config)
    run_ranks(2, train, folder / "train.py")
    return folder


def evaluated(folder: Path, *options: str, ranks: int) -> dict[str, Any]:
    """The numbers that the command writes."""
    output = folder / f"{ranks}-{'-'.join(options)}.json"
    arguments = ["eval", folder / "run", "--manifest", folder / "held" / "clips.csv"]
    arguments += ["--bins", str(BINS), "--output", output, *options]
    done = run_forked(BIN / "opensora-sp", *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss of") == 1
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_it_is_the_loss_of_validation(folder: Path, tmp_path: Path, precision: str) -> None:
    if precision != "fp32":
        # A learning rate with which the loss depends on the timestep after two steps.
        faster = "optimizer = dict(lr=0.1)"
        folder = write_run(tmp_path, f"precision = {precision!r}", faster)
    found = evaluated(folder, "--no-ema", "--seeds", "1", ranks=2)
    (line,) = read_lines(folder / "run" / "validation.jsonl")
    (bucket,) = found["buckets"]
    assert bucket["name"] == "28x24 x 5" and bucket["clips"] == 4 and found["seeds"] == [42]
    means = [one["mean"] for one in bucket["bins"]]
    torch.testing.assert_close(means, line["loss_by_bin"], rtol=1e-5, atol=1e-6)
    assert bucket["loss"] == {"mean": pytest.approx(line["loss"]), "half_width": None}
    assert found["weights"].endswith("step_00000002/model")


def test_clips_that_cannot_be_read_are_an_error(folder: Path, tmp_path: Path) -> None:
    manifest = write_toy_set(tmp_path, 2, broken=(0, 1))
    done = run_forked(BIN / "opensora-sp", "eval", folder / "run", "--manifest", manifest)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "got 2 clips in --manifest" in done.stderr and "28x24 x 5" in done.stderr


# Bad input


def write_bucketed(folder: Path, numbers: str) -> Settings:
    """Settings with a config of buckets and a manifest of one clip."""
    (folder / "held.csv").write_text(f"path,text,num_frames,height,width\na.mp4,a,{numbers}\n")
    config = TRAIN_BUCKETS.format(buckets=BUCKETS, manifest="clips.csv", steps=1)
    (folder / "config.py").write_text(config + "sp_size = 1\n")
    (folder / "weights.safetensors").write_bytes(b"")
    return Settings(
        str(folder / "weights.safetensors"),
        str(folder / "held.csv"),
        config=str(folder / "config.py"),
    )


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint with a config and files of no weights."""
    (folder / "ema").mkdir(parents=True)
    (folder / "ema" / "model.safetensors").write_bytes(b"")
    (folder / "state.json").write_text(json.dumps({"config": config}))
    (folder / "COMMIT").write_text("")


def test_clips_are_measured_in_every_bucket_that_they_fit(tmp_path: Path) -> None:
    *_, buckets = preflight(write_bucketed(tmp_path, "1000,2000,2000"))
    assert len(buckets) > 1 and len({bucket.name for bucket in buckets}) == len(buckets)
    for bucket in buckets:
        is_image = bucket.name.endswith(" x 1")
        assert list(bucket.clips.values()) == ([] if is_image else [[0]])


def test_a_config_need_not_name_clips(tmp_path: Path) -> None:
    """As that of the evaluation script of Open-Sora 1.3 does not."""
    settings = write_bucketed(tmp_path, "1000,2000,2000")
    settings = replace(settings, overrides=("dataset.manifest=None",))
    cfg, _, dataset, _ = preflight(settings)
    assert cfg.dataset.manifest == settings.manifest and len(dataset) == 1
    with pytest.raises(ValueError, match="with manifest None and path None"):
        load_train_config(str(settings.config), list(settings.overrides))


def test_buckets_without_a_batch_size_are_measured_too(tmp_path: Path) -> None:
    settings = write_bucketed(tmp_path, "1000,2000,2000")
    # One chosen at the start, one of which training keeps nothing, one that is set.
    changed = {"144p": {3: (1.0, None), 6: (0.0, 7)}, "256": {3: (0.5, 4)}}
    settings = replace(settings, overrides=(f"bucket_config={changed!r}",))
    assert batch_sizes(settings) == {"256 x 3": 4, "144p x 6": 1, "144p x 3": 1}


def batch_sizes(settings: Settings) -> dict[str, int]:
    *_, buckets = preflight(settings)
    assert all(bucket.clips for bucket in buckets)
    return {bucket.name: bucket.batch_size for bucket in buckets}


def test_a_manifest_whose_clips_fit_no_bucket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 1 clips in .*none of which has the size") as refused:
        preflight(write_bucketed(tmp_path, "2,8,8"))
    # The table says why.
    assert "1  fewer pixels than any resolution requires" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "different"),
    [
        (dict(bins=3), {"--bins"}),
        (dict(seeds=2), {"--seeds"}),
        (dict(use_ema=False), {"--no-ema", "weights"}),
    ],
)
def test_ranks_compare_their_settings(
    folder: Path, changed: dict[str, Any], different: set[str]
) -> None:
    settings = Settings(str(folder / "run"), str(folder / "held" / "clips.csv"))
    first, second = compared(settings), compared(replace(settings, **changed))
    assert {name for name in first if first[name] != second[name]} == different
    assert first["weights"] == ["step_00000002/ema"] and first["cost_model.latency"] > 0


def compared(settings: Settings) -> dict[str, Any]:
    cfg, weights, *_ = preflight(settings)
    return compared_settings(settings, cfg, weights)


def test_a_run_by_epochs_can_be_evaluated(folder: Path, tmp_path: Path) -> None:
    """Its checkpoints also record how many steps the epochs were."""
    state = json.loads((folder / "run" / "step_00000002" / "state.json").read_text())
    run = tmp_path / "step_00000002"
    write_checkpoint(run, state["config"] | {"epochs": 2, "max_steps": 2})
    cfg, *_ = preflight(Settings(str(run), str(folder / "held" / "clips.csv")))
    assert (cfg.epochs, cfg.max_steps) == (2, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(seeds=0), "got --seeds 0; expected 1 to"),
        (dict(bins=0), "got --bins 0; expected 1 to"),
        (dict(sp_size=2), "got sp_size 2 with 1 processes"),
        (dict(overrides=("batch_sise=3",)), "unknown key 'batch_sise'"),
        (dict(overrides=("vae.type=mine.VAE",)), "importing a class is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, changed: dict[str, Any], message: str) -> None:
    settings = Settings(str(folder / "run"), str(folder / "held" / "clips.csv"), **changed)
    with pytest.raises(ValueError, match=message):
        preflight(settings)


def test_weights_without_a_config_need_one(folder: Path, tmp_path: Path) -> None:
    weights = str(folder / "run" / "step_00000002" / "ema")
    manifest = str(folder / "held" / "clips.csv")
    with pytest.raises(ValueError, match="does not state its autoencoder.*pass --config CONFIG"):
        preflight(Settings(weights, manifest))
    cfg, found, *_ = preflight(Settings(weights, manifest, config=str(folder / "train.py")))
    assert cfg.batch_size == 3 and found.weights == weights


@pytest.mark.parametrize("key", ["model", "vae", "text_encoder", "scheduler"])
def test_a_checkpoint_names_nothing_to_import(folder: Path, tmp_path: Path, key: str) -> None:
    checkpoint = tmp_path / "step_00000002"
    checkpoint.mkdir()
    state = json.loads((folder / "run" / "step_00000002" / "state.json").read_text())
    state["config"][key] = {"type": "os.system"}
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / "COMMIT").write_text("")
    with pytest.raises(ValueError, match=rf"{key}\.type 'os\.system' in .*state.json, which is"):
        preflight(Settings(str(checkpoint), str(folder / "held" / "clips.csv")))


# The report


def test_intervals_are_those_of_student() -> None:
    """Scores 1, 2, 3: mean 2, standard error 0.57735, quantile 4.303."""
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2 and estimate.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert Estimate.of([1.0]) == Estimate(1.0, None)
    assert Estimate.of([1.0, 2.0] * 50).half_width == pytest.approx(0.1026, abs=1e-3)


def test_the_table_has_every_number() -> None:
    of_bucket = BucketLoss.of("144p x 17", 3, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert of_bucket.loss.mean == 2.5 and [one.mean for one in of_bucket.bins] == [2.0, 3.0]
    table = Evaluation("ema", "held.csv", [42, 43], [of_bucket], ["240p x 51"]).table()
    assert "144p x 17: 3 clips" in table and "without clips: 240p x 51" in table
    assert "50% to 100%  3.0000 ± 12.7060" in table and "seeds [42, 43]" in table
