"""Metrics of a run: the log, ``metrics.jsonl``, TensorBoard, W&B, and ``loss.png``."""

from __future__ import annotations

import io
import json
import logging
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opensora_sp.config import TrainConfig
from opensora_sp.console import LOGGER, add_log_handler
from opensora_sp.data import read_frames
from opensora_sp.json_reader import parse_json, read_json

from .wandb_run import WandbRun

# Fraction of the run that the running mean in loss.png covers.
WINDOW = 0.1


class Reporter:
    """Reports metrics on rank 0; on other ranks every call does nothing.

    Every number has the same name in ``metrics.jsonl``, TensorBoard and, if it is configured, W&B.
    """

    def __init__(
        self, run_dir: Path, cfg: TrainConfig, *, enabled: bool, start: int, session: dict[str, Any]
    ) -> None:
        self.enabled, self.run_dir, self.stop = enabled, run_dir, cfg.max_steps
        self._limits = cfg.limits
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        for name in ("metrics.jsonl", "validation.jsonl"):
            _drop_after(start, run_dir / name)
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        entry = {"step": start, "stop": self.stop, "began": began, **session}
        _append(run_dir / "sessions.jsonl", entry)

        self._outputs = ExitStack()
        open_output = self._outputs.enter_context
        self._board = open_output(SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1))
        self._wandb = None
        if cfg.wandb:
            self._wandb = open_output(closing(WandbRun(run_dir, cfg.model_dump(mode="json"))))
        # disable=None: no bar unless this is a terminal.
        bar = tqdm(
            total=self.stop,
            initial=start,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            disable=None,
        )
        self._bar = open_output(bar)
        open_output(logging_redirect_tqdm([LOGGER]))

    def step(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.enabled:
            self._bar.update(step - self._bar.n)

    def log(
        self, step: int, values: dict[str, float | None], peak_tflops: float | None = None
    ) -> None:
        """Report the numbers of a step; ``loss`` is None where every step was skipped."""
        if not self.enabled:
            return
        _append(self.run_dir / "metrics.jsonl", {"step": step, **values})
        self._draw(step, values)
        LOGGER.info("%s", log_line(step, self.stop, values, peak_tflops))

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        """Add the numbers to the curves of TensorBoard and W&B."""
        known = {name: value for name, value in values.items() if value is not None}
        for name, value in known.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(step, known)

    def close(self) -> None:
        """Close all outputs, and draw ``loss.png``."""
        if self.enabled:
            self._outputs.close()
            draw_loss(self.run_dir)

    def validated(self, step: int, losses: list[float] | None, folder: Path) -> None:
        """Report the held-out loss in each bin of timesteps, and the videos in ``folder``."""
        if not self.enabled:
            return
        if losses is not None:
            mean = sum(losses) / len(losses)
            LOGGER.info("step %d/%d | held-out loss %.4f", step, self.stop, mean)
            line = {"step": step, "loss": mean, "loss_by_bin": losses}
            _append(self.run_dir / "validation.jsonl", line)
            curves: dict[str, float | None] = {"validation/loss": mean}
            for number, loss in enumerate(losses, 1):
                curves[f"validation/loss of bin {number} of {len(losses)}"] = loss
            self._draw(step, curves)

        for described in sorted(folder.glob("*.json")):
            facts = read_json(described)
            frames = read_frames(described.with_suffix("." + facts["format"]), limits=self._limits)
            _show(self._board, described.stem, frames, facts["fps"], step)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _drop_after(step: int, path: Path) -> None:
    """Remove what a former attempt reported after the step that this one starts from."""
    if path.is_file():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _show(board: Any, name: str, frames: np.ndarray, fps: float, step: int) -> None:
    """Add frames to TensorBoard as a GIF; its own ``add_video`` would need moviepy for that."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    images = [Image.fromarray(frame) for frame in frames]
    gif, duration = io.BytesIO(), round(1000 / fps)
    images[0].save(gif, "GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)

    height, width = frames.shape[1:3]
    image = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=gif.getvalue()
    )
    summary = Summary(value=[Summary.Value(tag=f"validation/{name}", image=image)])
    board.file_writer.add_summary(summary, step)


def log_line(step: int, stop: int, values: dict[str, Any], peak_tflops: float | None) -> str:
    """The numbers of an interval on one line, without those that were not measured."""
    parts = [
        f"step {step}/{stop}",
        "no loss" if values["loss"] is None else f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{values['step_time']:.3g} s/step",
        f"{values['tokens_per_s']:.4g} tokens/s",
        f"{values['peak_memory_gb']:.2f} GB",
        f"waiting: data {values['data_wait']:.1%}, communication {values['communication']:.1%}",
        f"ETA {format_time(values['eta'])}",
    ]
    if "mfu" in values:
        parts.insert(6, f"MFU {values['mfu']:.1%} of {peak_tflops:g} TFLOP/s")
    return " | ".join(parts)


def format_time(seconds: float) -> str:
    """``3:02:01``, with days in front where there are any."""
    return str(timedelta(seconds=round(seconds)))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return read_lines(run_dir / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file without a last one that is being written; none without the file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [parse_json(line, f"a line of {path}") for line in lines if line.endswith("\n")]


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Mean over a window of a tenth of the run, one value for each position of the window."""
    width = max(1, int(len(losses) * WINDOW))
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def draw_loss(run_dir: Path) -> None:
    """Draw ``loss.png`` from the run's metrics."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    plot_loss(figure.subplots(), read_metrics(run_dir), color="tab:blue", label=run_dir.name)
    figure.savefig(run_dir / "loss.png")


def plot_loss(axes: Any, lines: list[dict[str, Any]], *, color: str, label: str) -> None:
    """Draw the loss as logged (a faint curve) and its running mean (a strong one)."""
    logged = [line for line in lines if line["loss"] is not None]
    if not logged:
        return
    steps, losses = (np.array([line[key] for line in logged]) for key in ("step", "loss"))
    mean = running_mean(losses)
    axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(steps[-len(mean) :], mean, color=color, label=label)

    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log")
    axes.grid(which="both", alpha=0.3)
    axes.legend()


def log_to(run_dir: Path, *, enabled: bool) -> None:
    """Log to ``train.log`` and the terminal; other ranks show only what concerns them alone."""
    LOGGER.propagate = False
    LOGGER.handlers.clear()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if enabled:
        handlers.append(logging.FileHandler(run_dir / "train.log", encoding="utf-8"))
    for handler in handlers:
        add_log_handler(handler, "%(asctime)s %(levelname)s %(message)s", is_main=enabled)
