"""Validation in the loop: what it writes, and that training does not notice it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from random_weights import draw_weights
from ranks import run_ranks
from runs import TRAIN, write_toy_set
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opensora_sp.config import load_train_config
from opensora_sp.data.dataset import Clip
from opensora_sp.data.randomness import normal, uniform
from opensora_sp.data.transforms import scale
from opensora_sp.diffusion.process import Noised
from opensora_sp.features.build import make_encoders
from opensora_sp.training import trainer, validation
from opensora_sp.training.metrics import read_metrics
from opensora_sp.training.preflight import preflight
from opensora_sp.training.trainer import Trainer

CHECKED = [
    "every=2",
    "prompts=['a red circle', 'white']",
    "num_sampling_steps=2",
    "cfg_scale=2.0",
    "bins=3",
]


def train_all(folder: Path, ways: dict[str, list[str]]) -> dict[str, list[float]]:
    """Train once for each way; the held-out losses of the last weights, computed without shards.

    By its clock, each validation ends 1,000 s before it begins.
    """
    from opensora_sp.plugin import current_device, launch

    launch(0)
    found = {}
    for name, options in ways.items():
        cfg = load_train_config(folder / "train.py", [f"outputs={folder / name}", *options])
        dataset, _ = preflight(cfg, None)
        (folder / name).mkdir(exist_ok=True)
        run = Trainer(cfg, dataset, None, current_device())
        clock = SimpleNamespace(perf_counter=itertools.count(0, -1000).__next__)
        with mock.patch.object(validation, "time", clock):
            run.train(folder / name)
        found[name] = expected_losses(run) if name == "current" else []
    dist.barrier()
    return found


def memory_of_encoders(folder: Path) -> list[Any]:
    """What is reserved for encoders when batch sizes are chosen, with a byte for each that is
    loaded. Training itself needs none, as with a feature cache.
    """
    from opensora_sp.plugin import current_device, launch

    launch(0)
    cfg = load_train_config(folder / "train.py", ["sp_size=1", f"outputs={folder / 'memory'}"])
    dataset, _ = preflight(cfg, None)
    loaded: list[Any] = []
    seen: list[Any] = []

    def load(*args: Any) -> Any:
        loaded.append(make_encoders(*args))
        return loaded[-1]

    def choose(*args: Any, reserved: int) -> None:
        seen.append(reserved)
        raise KeyboardInterrupt

    with (
        mock.patch.object(trainer, "make_source"),
        mock.patch.object(trainer, "_allocated", lambda device: len(loaded)),
        mock.patch.object(trainer, "make_encoders", load),
        mock.patch.object(trainer, "with_chosen_batch_sizes", choose),
        pytest.raises(KeyboardInterrupt),
    ):
        Trainer(cfg, dataset, None, current_device())
    return seen


def test_encoders_of_validation_are_loaded_before_batch_sizes_are_chosen(tmp_path: Path) -> None:
    manifest = str(write_toy_set(tmp_path, 4))
    (tmp_path / "train.py").write_text(
        TRAIN.format(manifest=manifest) + f"\nvalidation = dict({', '.join(CHECKED)})\n"
    )
    assert run_ranks(1, memory_of_encoders, tmp_path) == [[1]]


@torch.no_grad()
def expected_losses(run: Trainer) -> list[float]:
    """Clip by clip, whole outputs, the model's own forward."""
    clips, flow, seed = run.validator.heldout, run.batch_maker.process, run.cfg.seed
    sums = torch.zeros(3)
    readable = [i for i in range(len(clips)) if isinstance(clips[i], Clip)]
    assert readable == [0, 2, 3]

    for i in readable:
        latents = run.source.vae.encode(scale(clips[i].video)[None])
        noise = normal(tuple(latents.shape[1:]), seed, "validation_noise", i)[None]
        y, mask = run.source.text_encoder.encode([clips[i].text])
        sizes = dict(
            fps=torch.tensor([clips[i].fps]),
            height=torch.tensor([28.0]),
            width=torch.tensor([24.0]),
        )
        for k in range(3):
            t = torch.tensor([1000 * (k + uniform(seed, "validation_timestep", i, k)) / 3])
            noised = Noised.of(flow, latents, noise, t, None)
            output = run.module(noised.x_t, t, y, mask, **sizes)
            sums[k] += flow.losses(output, noised)[0]

    return (sums / len(readable)).tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("validated")
    held = write_toy_set(folder / "held", 4, broken=(1,))
    (folder / "train.py").write_text(
        TRAIN.format(manifest=str(write_toy_set(folder / "set", 7)))
        + "max_steps = 4\nckpt_every = 4\nload = None\n"
    )
    checked = [f"validation.{option}" for option in [*CHECKED, f"manifest={held}"]]
    ways = {"averaged": checked, "current": [*checked, "validation.use_ema=False"]}
    return folder, run_ranks(2, train_all, folder, ways)[0]["current"]


@pytest.mark.slow
def test_training_does_not_notice_it(trained: tuple[Path, list[float]]) -> None:
    folder, _ = trained
    run_ranks(2, train_all, folder, {"without": []})
    names = ("without", "averaged", "current")
    losses = [
        [(line["loss"], line["grad_norm"]) for line in read_metrics(folder / name)]
        for name in names
    ]
    assert len(losses[0]) == 4 and losses[0] == losses[1] == losses[2]
    # Its time, here a negative one, is not part of the next step's.
    times = [line["step_time"] for line in read_metrics(folder / "current")]
    assert [seconds > 1000 for seconds in times] == [False, False, True, False]
    for part in ("model/model", "ema/model", "optimizer"):
        wanted, *others = (
            load_file(folder / name / "step_00000004" / f"{part}.safetensors") for name in names
        )
        for other in others:
            assert all(torch.equal(tensor, other[key]) for key, tensor in wanted.items())


def test_heldout_losses_by_bin(trained: tuple[Path, list[float]]) -> None:
    folder, expected = trained
    written = (folder / "current" / "validation.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    torch.testing.assert_close(lines[-1]["loss_by_bin"], expected, rtol=1e-5, atol=1e-6)
    assert lines[-1]["loss"] == pytest.approx(sum(expected) / 3)
    averaged = json.loads((folder / "averaged" / "validation.jsonl").read_text().splitlines()[-1])
    assert averaged["loss_by_bin"] != lines[-1]["loss_by_bin"]


def test_videos_are_written_and_losses_tracked(trained: tuple[Path, list[float]]) -> None:
    folder, _ = trained
    run = folder / "averaged"
    for step in (2, 4):
        written = {path.name for path in (run / "validation" / f"step_0000000{step}").glob("*.mp4")}
        assert written == {"000-a-red-circle.mp4", "001-white.mp4"}
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("validation/loss")] == [2, 4]
    assert "validation/loss of bin 3 of 3" in board.Tags()["scalars"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["every=2"], "got validation without prompts and manifest"),
        (["every=0", "prompts=['a']"], "got validation.every = 0"),
        (["every=2", "promts=['a']"], "did you mean 'prompts'"),
        (["every=2", "prompts=[{'prompt': 'a', 'sed': 1}]"], "did you mean 'seed'"),
        (["every=2", "manifest=none.csv"], "got manifest 'none.csv', which is not a file"),
        (
            ["every=2", 'prompts=[\'a{"reference_path": "b.png"}\']'],
            "got reference 'b.png', which is not a file",
        ),
    ],
)
def test_what_cannot_be_validated_is_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "train.py").write_text(
        TRAIN.format(manifest=str(write_toy_set(tmp_path, 3))) + "sp_size = 1\n"
    )
    with pytest.raises(ValueError, match=message):
        given = [f"validation.{option}" for option in options]
        preflight(load_train_config(tmp_path / "train.py", given), None)


def heldout_losses_by_batch_size(config: Path, folder: Path, sp_size: int) -> list[list[float]]:
    """Held-out losses of one random model in validation batches of several sizes."""
    from opensora_sp.plugin import current_device, launch

    launch(0)
    outputs = folder / f"{dist.get_world_size()} in groups of {sp_size}"
    cfg = load_train_config(config, [f"sp_size={sp_size}", f"outputs={outputs}"])
    run = Trainer(cfg, preflight(cfg, None)[0], None, current_device())
    draw_weights(run.module, std=0.2)

    found, validator = [], run.validator
    for batch_size in (1, 2, 3, 8):
        validator.validation = validator.validation.model_copy(update={"batch_size": batch_size})
        with torch.no_grad():
            found.append(validator._heldout_losses(validator.heldout).tolist())
    return found


def test_heldout_losses_do_not_depend_on_batch_size_and_ranks(tmp_path: Path) -> None:
    """Each rank encodes the captions of its own clips, which depend on the batch size."""
    held = write_toy_set(tmp_path / "held", 9, broken=(1,))
    config = TRAIN.format(manifest=str(write_toy_set(tmp_path / "set", 7)))
    config += f"validation = dict(every=1, manifest={str(held)!r}, bins=3)\n"
    (tmp_path / "train.py").write_text(config)
    arguments = heldout_losses_by_batch_size, tmp_path / "train.py", tmp_path
    (alone,) = run_ranks(1, *arguments, 1)
    assert min(alone[0]) > 0.1
    for losses in alone:
        torch.testing.assert_close(losses, alone[0], rtol=1e-5, atol=1e-6)
    # One group of all ranks, and groups of one rank that measure clips of their own.
    for world, sp_size in ((2, 2), (3, 3), (2, 1)):
        for rank_losses in run_ranks(world, *arguments, sp_size):
            for losses in rank_losses:
                torch.testing.assert_close(losses, alone[0], rtol=1e-5, atol=1e-6)
