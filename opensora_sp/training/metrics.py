"""Metrics of a run: the log, ``metrics.jsonl``, ``loss.png``, and the trackers.

None of them ends a run. What cannot be written is logged once, and the run continues without it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.checkpoint.paths import LOG
from opensora_sp.common.console import LOGGER, add_log_handler
from opensora_sp.common.files import parse_json, read_json, read_small_file
from opensora_sp.config import TrainConfig

from .trackers import TensorBoardTracker, Tracker, WandbTracker, wants_tensorboard

logger = logging.getLogger(__name__)
# In a run's folder: what differs between ranks, by rank, and the videos of each validation.
RANKS, VIDEOS = "ranks.jsonl", "validation"
MAX_LOG_BYTES = 512 << 20  # of metrics.jsonl and its like
# Fraction of the run that the running mean in loss.png covers.
WINDOW = 0.1


class OptionalOutputs:
    """Outputs that a run can do without: ``with outputs.of("TensorBoard"): ...``."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def of(self, output: str) -> Iterator[None]:
        """Inside, an error ends this output alone; the first error of each is logged."""
        try:
            yield
        except Exception as error:
            self.report(output, f"{type(error).__name__}: {error}")

    def report(self, output: str, error: str) -> None:
        """Log the error, unless there has been one of this output."""
        if output not in self._failed:
            self._failed.add(output)
            logger.warning("%s is incomplete from here on (%s); the run continues", output, error)


class Reporter:
    """Reports metrics on rank 0; on other ranks every call does nothing.

    Every number has the same name in ``metrics.jsonl``, TensorBoard and, if it is configured, W&B.

    Attributes:
        outputs: what the run continues without, if it cannot be written.
        last: the numbers that were logged last.
    """

    def __init__(
        self, run_dir: Path, cfg: TrainConfig, *, enabled: bool, start: int, session: dict[str, Any]
    ) -> None:
        self.enabled, self.run_dir, self.stop = enabled, run_dir, cfg.max_steps
        self.outputs = OptionalOutputs()
        self.last: dict[str, float | None] = {}
        if not enabled:
            return
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        with self.outputs.of("metrics.jsonl"):
            for name in ("metrics.jsonl", "validation.jsonl", RANKS):
                drop_after(start, run_dir / name)
        with self.outputs.of("sessions.jsonl"):
            began = datetime.now().astimezone().isoformat(timespec="seconds")
            entry = {"step": start, "stop": self.stop, "began": began, **session}
            append_line(run_dir / "sessions.jsonl", entry)

        self._closing = ExitStack()
        self._trackers: dict[str, Tracker] = {}
        self._open_trackers(cfg, start, session)
        # disable=None: no bar unless this is a terminal.
        bar = tqdm(total=self.stop, initial=start, desc="train", unit="step", disable=None)
        self._bar = self._closing.enter_context(bar)
        self._closing.enter_context(logging_redirect_tqdm([LOGGER]))

    def _open_trackers(self, cfg: TrainConfig, start: int, session: dict[str, Any]) -> None:
        """Open the configured trackers, except those where that fails."""
        hyperparameters = {**cfg.model_dump(mode="json"), "session": session}
        openers: dict[str, Callable[[], Tracker]] = {}
        if wants_tensorboard(cfg):
            openers["TensorBoard"] = lambda: TensorBoardTracker(
                self.run_dir, hyperparameters, start=start
            )
        if cfg.wandb:
            openers["W&B"] = lambda: WandbTracker(self.run_dir, hyperparameters)

        # Each on its own: one that fails does not keep the others from opening.
        for name, opened in openers.items():
            with self.outputs.of(name):
                tracker = opened()
                self._closing.enter_context(self.outputs.of(name))
                self._closing.enter_context(closing(tracker))
                self._trackers[name] = tracker

    def step(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.enabled:
            self._bar.update(step - self._bar.n)

    def log(
        self,
        step: int,
        values: dict[str, float | None],
        peak_tflops: float | None = None,
        by_rank: dict[str, list[float]] | None = None,
    ) -> None:
        """Report the numbers of a step; ``loss`` is None where every step was skipped.

        Args:
            by_rank: further numbers, one for each rank, which go to ``ranks.jsonl`` alone.
        """
        if not self.enabled:
            return
        self.last = values
        with self.outputs.of("metrics.jsonl"):
            append_line(self.run_dir / "metrics.jsonl", {"step": step, **values})
        if by_rank:
            with self.outputs.of(RANKS):
                append_line(self.run_dir / RANKS, {"step": step, **by_rank})
        self._draw(step, values)
        LOGGER.info("%s", log_line(step, self.stop, values, peak_tflops))

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        """Add the numbers to the curves of the trackers."""
        known = {name: number for name, number in values.items() if number is not None}
        self._on_trackers(lambda tracker: tracker.scalars(step, known))

    def _on_trackers(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            with self.outputs.of(name):
                do(tracker)

    def close(self) -> None:
        """Close all outputs, and draw ``loss.png``."""
        if self.enabled:
            self._closing.close()
            self.draw_loss()

    def draw_loss(self) -> None:
        """Draw ``loss.png`` of the metrics so far."""
        if self.enabled:
            with self.outputs.of("loss.png"):
                draw_loss(self.run_dir)

    def validated(self, step: int, losses: list[float] | None, folder: Path) -> None:
        """Report the held-out loss in each bin of timesteps, and the videos in ``folder``."""
        if not self.enabled:
            return
        if losses is not None:
            mean = sum(losses) / len(losses)
            LOGGER.info("step %d/%d | held-out loss %.4f", step, self.stop, mean)
            line = {"step": step, "loss": mean, "loss_by_bin": losses}
            with self.outputs.of("validation.jsonl"):
                append_line(self.run_dir / "validation.jsonl", line)
            curves: dict[str, float | None] = {"validation/loss": mean}
            for number, loss in enumerate(losses, 1):
                curves[f"validation/loss of bin {number} of {len(losses)}"] = loss
            self._draw(step, curves)

        # Read from the folder: each replica has written some of the videos.
        for described in sorted(folder.glob("*.json")):
            facts = read_json(described)
            file = described.with_suffix("." + facts["format"])
            self._show(step, f"{folder.parent.name}/{described.stem}", file, facts["fps"])

    def _show(self, step: int, name: str, file: Path, fps: float) -> None:
        self._on_trackers(lambda tracker: tracker.video(step, name, file, fps))


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON, or none of it."""
    text = json.dumps(line).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        written = file.write(text)
        # A disk that becomes full takes a part without an error; the next line would be lost too.
        if written < len(text):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def drop_after(step: int, path: Path) -> None:
    """Remove what a former attempt reported after the step that this one starts from."""
    if path.is_file():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        # Replaced as a whole: a process that is killed meanwhile leaves the file as it was.
        FileSystem().write_file(path, text.encode())


def log_line(step: int, stop: int, values: dict[str, Any], peak_tflops: float | None) -> str:
    """The numbers of an interval on one line, without those that were not measured."""
    waiting = f"data {values['data_wait']:.1%}"
    # A single process waits for no other.
    if "communication" in values:
        waiting += f", communication {values['communication']:.1%}"
    parts = [
        f"step {step}/{stop}",
        "no loss" if values["loss"] is None else f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{values['step_time']:.3g} s/step",
        f"{values['tokens_per_s']:.4g} tokens/s",
        f"{values['peak_memory_gb']:.2f} GB",
        f"waiting: {waiting}",
        f"ETA {timedelta(seconds=round(values['eta']))}",
    ]
    if "mfu" in values:
        parts.insert(6, f"MFU {values['mfu']:.1%} of {peak_tflops:g} TFLOP/s")
    return " | ".join(parts)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return read_lines(run_dir / "metrics.jsonl")


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    """Step, ``loss`` and ``loss_by_bin`` of each validation on held-out clips."""
    return read_lines(run_dir / "validation.jsonl", "loss", "loss_by_bin")


def read_lines(path: Path, *names: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file that have a step and these names; none without the file.

    Damaged lines are skipped: the last one while it is being written, and where the process was
    killed meanwhile or the disk has changed bytes.

    Raises:
        ValueError: if the file is larger than ``MAX_LOG_BYTES``.
    """
    if not path.is_file():
        return []
    content = read_small_file(path, MAX_LOG_BYTES, "the numbers of a run")
    whole = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    lines = []
    for text in whole:
        with suppress(ValueError):
            line = parse_json(text, f"a line of {path}")
            is_whole = isinstance(line, dict) and line.keys() >= {*names}
            if is_whole and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Mean over a window of a tenth of the run, one value for each position of the window."""
    width = max(1, int(len(losses) * WINDOW))
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def draw_loss(run_dir: Path) -> None:
    """Draw ``loss.png``: the training loss as logged (faint) and its running mean, and the held-out
    loss of each validation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    logged = [line for line in read_metrics(run_dir) if line.get("loss") is not None]
    if logged:
        steps, losses = ([line[key] for line in logged] for key in ("step", "loss"))
        mean = running_mean(np.array(losses))
        axes.plot(steps, losses, color="tab:blue", linewidth=0.8, alpha=0.3)
        axes.plot(steps[-len(mean) :], mean, color="tab:blue", label=run_dir.name)
    validations = read_validations(run_dir)
    if validations:
        steps, losses = ([line[key] for line in validations] for key in ("step", "loss"))
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="held-out")
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(run_dir / "loss.png")


def log_to(run_dir: Path, *, enabled: bool) -> None:
    """Log to ``train.log`` and the terminal; other ranks show only what concerns them alone."""
    # Root handlers of libraries would print each line twice.
    LOGGER.propagate = False
    LOGGER.handlers.clear()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if enabled:
        handlers.append(logging.FileHandler(run_dir / LOG, encoding="utf-8"))
    for handler in handlers:
        add_log_handler(handler, "%(asctime)s %(levelname)s %(message)s", is_main=enabled)
