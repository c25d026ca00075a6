"""What a training continues after: steps without finite numbers, and requests to stop.

The campaigns have full disks, and ranks that are killed or differ.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polling import wait_until
from ranks import run_ranks
from runs import write_training

from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.config import load_train_config
from opensora_sp.runtime.watchdog import Watchdog

TENSORS = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")
SMALL = [
    "warmup_steps=3",
    "batch_size=2",
    "num_frames=3",
    "image_size=(16, 16)",
    "model.depth=1",
    "ckpt_every=1",
]
# No step has to be settled at once.
READ_LATE = ["log_every=100", "ckpt_every=100"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), 8)


def train_once(config: Path, outputs: Path, *options: str, resume: str | None = None) -> str:
    """Train in the world of this process; returns what it raised."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    try:
        train(load_train_config(config, [f"outputs={outputs}", *SMALL, *options]), resume=resume)
    except (ValueError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def with_losses(change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Change the losses of rank 1, by the number of the step."""
    from opensora_sp.diffusion import RectifiedFlow

    plain, calls = getattr(RectifiedFlow.losses, "plain", RectifiedFlow.losses), [0]

    def losses(self: Any, *args: Any) -> torch.Tensor:
        step, calls[0] = calls[0] // 2, calls[0] + 1
        found = plain(self, *args)
        return change(step, found) if dist.get_rank() == 1 else found

    losses.plain = plain
    RectifiedFlow.losses = losses


def bad_to_the_end_read_late(config: Path, root: Path) -> str:
    """NaN in all steps but the first; no log, no checkpoint. Also the last step that was begun."""
    begun = []

    def change(step: int, losses: torch.Tensor) -> torch.Tensor:
        begun.append(step + 1)
        return losses * float("nan") if step else losses

    with_losses(change)
    outcome = train_once(config, root / "ended late", "max_steps=9", "max_bad_steps=3", *READ_LATE)
    return f"{outcome}; began step {max(begun, default=0)}"


def stopped(config: Path, root: Path, *options: str) -> str:
    """Rank 1 gets SIGTERM in its second step."""
    from opensora_sp.training.step import TrainingStep

    plain = TrainingStep.run

    def step(self: Any, number: int, batches: Any, watch: Watchdog) -> Any:
        if number == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if number == 1:
            wait_until(lambda: watch.stop_reason)
        return plain(self, number, batches, watch)

    TrainingStep.run = step
    try:
        outputs = root / " ".join(["asked", *options[:1]])
        return train_once(config, outputs, "max_steps=9", *options)
    finally:
        TrainingStep.run = plain
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def stopped_late(config: Path, root: Path) -> str:
    """Without a log or a checkpoint; the step that follows the second one has no finite loss."""
    with_losses(lambda step, x: x * float("nan") if step == 2 else x)
    return stopped(config, root, *READ_LATE)


def stopped_in_the_last_step(config: Path, root: Path) -> str:
    """That step has no finite loss."""
    with_losses(lambda step, x: x * float("nan") if step == 1 else x)
    return stopped(config, root, "max_steps=2", "keep_last=1", "batch_order=mixed")


CASES: dict[str, tuple] = {
    "ended late": (bad_to_the_end_read_late,),
    "stopped": (stopped,),
    "stopped late": (stopped_late,),
    "stopped in the last step": (stopped_in_the_last_step,),
}


def one_case(name: str, config: Path, root: Path) -> str:
    with_losses(lambda step, x: x)
    function, *more = CASES[name]
    return function(config, root, *more)


@dataclass(frozen=True)
class Outcomes:
    config: Path
    root: Path

    def of(self, name: str) -> list[str]:
        """Train once as in this case; returns what the training raised on each rank."""
        return run_ranks(2, one_case, name, self.config, self.root)


@pytest.fixture(scope="module")
def outcomes(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(config, tmp_path_factory.mktemp("runs"))


def digests(run_dir: Path, step: int | str) -> list[str]:
    name = step if isinstance(step, str) else f"step_{step:08d}"
    files = json.loads((run_dir / name / "manifest.json").read_text())["files"]
    return [files[name]["sha256"] for name in TENSORS]


def test_outcomes_are_read_one_step_late_where_no_log_or_checkpoint_needs_them(
    outcomes: Outcomes,
) -> None:
    for error in outcomes.of("ended late"):
        assert "in 3 steps in a row, up to step 4 (max_bad_steps)" in error
        assert "and resume from the last good checkpoint" in error
    assert outcomes.of("ended late")[1].endswith("; began step 5")

    assert outcomes.of("stopped late") == ["finished", "finished"]
    run_dir = outcomes.root / "asked log_every=100"
    assert [path.name for path in committed_checkpoints(run_dir)] == ["step_00000003"]
    state = state_of(run_dir, 3)
    assert (state["step"], state["skipped_steps"], state["next_micro_batch"]) == (3, 1, 6)


def test_a_run_that_is_asked_to_stop_in_its_last_step_has_finished(outcomes: Outcomes) -> None:
    """It is skipped. So the checkpoint before it, which may be the last good one, is kept."""
    assert outcomes.of("stopped in the last step") == ["finished", "finished"]
    run_dir = outcomes.root / "asked max_steps=2"
    log = (run_dir / "train.log").read_text()
    assert "finished: 2 of 2 steps" in log and "stopped after step" not in log
    assert (run_dir / "summary.json").exists()
    assert [path.name[-1] for path in committed_checkpoints(run_dir)] == ["1", "2"]


def test_a_request_to_stop_ends_the_run_after_the_step(outcomes: Outcomes) -> None:
    assert outcomes.of("stopped") == ["finished", "finished"]

    run_dir = outcomes.root / "asked"
    assert committed_checkpoints(run_dir)[-1].name == "step_00000002"
    stopped = "stopped after step 2 of 9 (rank 1: SIGTERM), with a checkpoint; add --resume auto"
    assert stopped in (run_dir / "train.log").read_text()


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / f"step_{step:08d}" / "state.json").read_text())


def half_precision(config: Path, root: Path) -> list[dict[str, float]]:
    """fp16 on a CPU: the loss scale doubles after two good steps. Whole, and from step 3 on."""
    from opensora_sp.plugin import SequenceParallelPlugin, current_device, launch, plugin
    from opensora_sp.training import metrics, trainer
    from opensora_sp.training.preflight import preflight

    plugin._check_arguments = lambda *args: None  # it refuses fp16 on a CPU, where it is of no use
    scale = dict(initial_scale=64, growth_interval=2, hysteresis=1)
    SequenceParallelPlugin.from_config = lambda cfg: SequenceParallelPlugin(
        sp_size=2, precision="fp16", **scale
    )
    metrics.draw_loss = lambda run_dir: None
    launch(0)
    for name, start in (("whole", None), ("resumed", root / "whole" / "step_00000003")):
        cfg = load_train_config(config, [f"outputs={root / name}", *SMALL, "max_steps=5"])
        dataset, _ = preflight(cfg, None if start is None else str(start))
        (root / name).mkdir(exist_ok=True)
        dist.barrier()
        trainer.Trainer(cfg, dataset, start, current_device()).train(root / name)
    dist.barrier()
    return [state_of(root / "whole", step)["loss_scale"] for step in range(1, 6)]


def test_the_loss_scale_of_fp16_is_saved_and_resumed(config: Path, tmp_path: Path) -> None:
    scales = run_ranks(2, half_precision, config, tmp_path)[0]
    assert [one["scale"] for one in scales] == [64, 128, 128, 256, 256]
    assert [one["growth"] for one in scales] == [1, 0, 1, 0, 1]
    for step in (4, 5):
        assert digests(tmp_path / "resumed", step) == digests(tmp_path / "whole", step)
        assert state_of(tmp_path / "resumed", step)["loss_scale"] == scales[step - 1]
