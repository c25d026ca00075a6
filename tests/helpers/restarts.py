"""Runs that are disturbed and started again, compared with one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launched import WarmJob
from ranks import run_ranks

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import (
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    newest_checkpoint,
)
from opensora_sp.config import load_train_config
from opensora_sp.training.metrics import read_lines, read_metrics

Layout = tuple[int, int]
"""dp and sp."""
# Learning rate and EMA decay change with each of the first steps. Two ranks have to exchange tokens
# of three clips; of two, each would take one.
TINY = ["warmup_steps=3", "batch_size=3", "num_frames=3", "image_size=(16, 16)", "model.depth=1"]
PROMPTS = ["a", "b", "c"]
VALIDATION = ["every=3", f"prompts={PROMPTS}", "num_sampling_steps=1", "bins=1", "batch_size=3"]
STEPS = 6  # of a run that is disturbed; its starts after that take two more each
EVERY = 2  # steps from one checkpoint to the next
STARTS = 2
MOST_STEPS = STEPS + STARTS * EVERY


def train_once(config: Path, outputs: Path, layout: Layout, steps: int, *options: str) -> str:
    """Train in the world of this process, from where the run stands; returns what it raised."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    own = [f"outputs={outputs}", f"max_steps={steps}", f"sp_size={layout[1]}", *TINY]
    try:
        train(load_train_config(config, [*own, *options]), resume="auto")
    except ValueError as error:
        return str(error)
    return ""


class Undisturbed(dict[Layout, Path]):
    """Runs with a checkpoint after each step, by layout; each is made when it is asked for."""

    def __init__(self, config: Path, root: Path) -> None:
        self.config, self.root = config, root

    def __missing__(self, layout: Layout) -> Path:
        dp, sp = layout
        outputs = self.root / f"undisturbed dp{dp} sp{sp}"
        run_ranks(dp * sp, train_once, self.config, outputs, layout, MOST_STEPS, "ckpt_every=1")
        self[layout] = outputs
        return outputs


def content_of(outputs: Path, step: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Digests of all tensors of a checkpoint, and the rest of the state."""
    folder = outputs / checkpoint_name(step)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    state = json.loads((folder / "state.json").read_text())
    # It names the folder.
    del state["config"]
    tensors = {name: files[name]["sha256"] for name in files if name.endswith(".safetensors")}
    return tensors, state


def losses_of(outputs: Path) -> dict[int, float]:
    """By step."""
    return {line["step"]: line["loss"] for line in read_metrics(outputs)}


def newest_step(outputs: Path) -> int:
    """The step of the newest committed checkpoint, 0 without one."""
    newest = newest_checkpoint(outputs)
    return 0 if newest is None else checkpoint_step(newest) or 0


def assert_nothing_torn(outputs: Path, whole: Path) -> int:
    """All committed checkpoints are whole, and those of the undisturbed run; the newest's step."""
    for checkpoint in committed_checkpoints(outputs):
        step = checkpoint_step(checkpoint) or 0
        try:
            verify(checkpoint)
        except ValueError as error:
            raise AssertionError(f"{checkpoint} is committed and torn: {error}") from None
        assert content_of(outputs, step) == content_of(whole, step), (
            f"{checkpoint} is not that of the undisturbed run"
        )
    return newest_step(outputs)


def assert_starts_continue(
    config: Path,
    folder: Path,
    outputs: Path,
    layout: Layout,
    whole: Path,
    *options: str,
    context: Any = None,
) -> None:
    """Each of the next starts resumes from the newest checkpoint, bit by bit as the whole run."""
    losses = losses_of(whole)
    for number in range(STARTS):
        newest = assert_nothing_torn(outputs, whole)
        stop = newest + EVERY
        work = (train_once, config, outputs, layout, stop, f"ckpt_every={EVERY}", *options)
        job = WarmJob(folder / f"start {number}", layout[0] * layout[1], *work, context=context)
        try:
            assert job.results(60) == [""] * len(job.ranks), job.text
        finally:
            job.kill()

        begun = read_lines(outputs / "sessions.jsonl")[-1]["step"]
        assert begun == newest, f"start {number} began at step {begun}, not {newest}\n{job.text}"
        assert content_of(outputs, stop) == content_of(whole, stop), (
            f"start {number} differs from the undisturbed run at step {stop}"
        )
        found = losses_of(outputs)
        for step in range(newest + 1, stop + 1):
            assert found[step] == losses[step], f"the loss of step {step} differs"

    left = {path.name for path in outputs.iterdir() if path.name.startswith((".", "run.lock"))}
    assert not left, f"{left} stay behind"
    uncommitted = set(outputs.glob("step_????????")) - set(committed_checkpoints(outputs))
    assert not uncommitted, f"{uncommitted} stay behind"
