"""What a run reports: a line for each interval, TensorBoard, W&B, a JSONL with the same numbers, ``loss.png``."""

from __future__ import annotations

import io
import json
import logging
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from opensora_sp.config import TrainConfig
from opensora_sp.console import is_shown_on_all_ranks
from opensora_sp.data import read_frames

from .wandb_run import WandbRun

if TYPE_CHECKING:
    from .trainer import Run

LOGGER = logging.getLogger("opensora_sp")
WINDOW = 0.1  # share of the run that the running mean in loss.png covers


class Reporter:
    """Reports on rank 0; on other ranks every call does nothing.

    Every number that is logged goes to all places under one name: ``metrics.jsonl``, TensorBoard and, if the config
    asks for it, W&B.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: TrainConfig,
        *,
        enabled: bool,
        start: int,
        session: dict[str, Any] | None = None,
    ) -> None:
        self.enabled, self.run_dir, self.stop = enabled, run_dir, cfg.max_steps
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        for name in ("metrics.jsonl", "validation.jsonl"):
            self._drop_after(start, run_dir / name)
        with (run_dir / "sessions.jsonl").open("a") as file:
            began = datetime.now().astimezone().isoformat(timespec="seconds")
            file.write(
                json.dumps({"step": start, "stop": self.stop, "began": began, **(session or {})})
                + "\n"
            )
        self._jsonl = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1)
        self._wandb = WandbRun(run_dir, cfg.model_dump(mode="json")) if cfg.wandb else None
        self._above_bar = ExitStack()
        self._above_bar.enter_context(logging_redirect_tqdm([LOGGER]))
        self._bar = tqdm(  # in a terminal alone
            total=self.stop,
            initial=start,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            disable=None,
        )

    def step(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.enabled:
            self._bar.update(step - self._bar.n)

    def log(
        self, step: int, values: dict[str, float | None], peak_tflops: float | None = None
    ) -> None:
        """Report the numbers of a step; ``loss`` is None where no step could be taken."""
        if not self.enabled:
            return
        self._jsonl.write(json.dumps({"step": step, **values}) + "\n")
        self._draw(step, values)
        LOGGER.info("%s", told_line(step, self.stop, values, peak_tflops))

    def _draw(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(
                step, {name: value for name, value in values.items() if value is not None}
            )

    def close(self) -> None:
        if self.enabled:
            self._bar.close()
            self._above_bar.close()
            self._board.close()
            self._jsonl.close()
            if self._wandb is not None:
                self._wandb.close()
            draw_loss(self.run_dir)

    def validated(self, step: int, losses: list[float] | None, folder: Path) -> None:
        """Report a validation: the held-out loss in each bin of timesteps, and the videos written to ``folder``."""
        if not self.enabled:
            return
        if losses is not None:
            mean = sum(losses) / len(losses)
            LOGGER.info("step %d/%d | held-out loss %.4f", step, self.stop, mean)
            with (self.run_dir / "validation.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean, "loss_by_bin": losses}) + "\n")
            bins = {
                f"validation/loss of bin {k + 1} of {len(losses)}": loss
                for k, loss in enumerate(losses)
            }
            self._draw(step, {"validation/loss": mean, **bins})
        for described in sorted(folder.glob("*.json")):
            facts = json.loads(described.read_text(encoding="utf-8"))
            _show(self._board, described.with_suffix("." + facts["format"]), facts, step)

    def _drop_after(self, step: int, path: Path) -> None:
        """Forget what a former attempt reported beyond the step that this one starts from."""
        if path.is_file():
            kept = [line for line in read_lines(path) if line["step"] <= step]
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _show(board: Any, path: Path, facts: dict[str, Any], step: int) -> None:
    """Put a video into TensorBoard, as the GIF that its own ``add_video`` would need moviepy to make."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames = read_frames(path)
    images = [Image.fromarray(frame) for frame in frames]
    gif = io.BytesIO()
    images[0].save(
        gif,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / facts["fps"]),
        loop=0,
    )
    height, width = frames.shape[1:3]
    image = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=gif.getvalue()
    )
    summary = Summary(value=[Summary.Value(tag=f"validation/{path.stem}", image=image)])
    board.file_writer.add_summary(summary, step)


def session_of(run: Run) -> dict[str, Any]:
    """What ``sessions.jsonl`` says of one attempt at a run, beside its steps."""
    on_cuda = run.device.type == "cuda"
    return {
        "model": run.cfg.model["type"],
        "parameters": sum(p.numel() for p in run.module.parameters()),
        "precision": run.cfg.precision,
        "dp_size": run.mesh.dp_size,
        "sp_size": run.mesh.sp_size,
        "device": torch.cuda.get_device_name(run.device) if on_cuda else "CPU",
        "peak_tflops": run.meter.peak.tflops,
    }


def told_line(step: int, stop: int, values: dict[str, Any], peak_tflops: float | None) -> str:
    """The numbers of an interval on one line; what was not measured is left out."""
    parts = [
        f"step {step}/{stop}",
        "no loss" if values["loss"] is None else f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{values['step_time']:.3g} s/step",
        f"{values['tokens_per_s']:.4g} tokens/s",
        f"{values['peak_memory_gb']:.2f} GB",
        f"waiting: data {values['data_wait']:.1%}, communication {values['communication']:.1%}",
        f"ETA {told_time(values['eta'])}",
    ]
    if "mfu" in values:
        parts.insert(6, f"MFU {values['mfu']:.1%} of {peak_tflops:g} TFLOP/s")
    return " | ".join(parts)


def told_time(seconds: float) -> str:
    """``3:02:01``, with days in front where there are any."""
    return str(timedelta(seconds=round(seconds)))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return read_lines(run_dir / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, without a last one that is being written."""
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Mean over a window of a tenth of the run, one value for each place where the window fits."""
    width = max(1, int(len(losses) * WINDOW))
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def draw_loss(run_dir: Path) -> Path | None:
    """Draw ``loss.png`` from the run's metrics; returns its path, or None if nothing was logged yet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metrics = [line for line in read_metrics(run_dir) if line["loss"] is not None]
    if not metrics:
        return None
    steps, losses = (np.array([line[key] for line in metrics]) for key in ("step", "loss"))
    mean = running_mean(losses)
    figure, axes = plt.subplots(figsize=(7, 4), dpi=110, layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="each step")
    axes.plot(
        steps[len(steps) - len(mean) :],
        mean,
        color="tab:blue",
        label=f"running mean, {WINDOW:.0%} of the run",
    )
    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log", title=run_dir.name)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def log_to(run_dir: Path, *, enabled: bool) -> None:
    """Send the package's log to ``train.log`` and the terminal; other ranks show only what is theirs alone."""
    LOGGER.setLevel(logging.INFO if enabled else logging.WARNING)
    LOGGER.propagate = False
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if enabled:
        handlers.append(logging.FileHandler(run_dir / "train.log", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        if not enabled:
            handler.addFilter(is_shown_on_all_ranks)
        LOGGER.addHandler(handler)
