"""What a run reports: a progress bar, a log file, TensorBoard scalars, a JSONL with the same numbers, ``loss.png``."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opensora_sp.data import read_frames

LOGGER = logging.getLogger("opensora_sp")
WINDOW = 0.1  # share of the run that the running mean in loss.png covers


class Reporter:
    """Reports on rank 0; on other ranks every call does nothing."""

    def __init__(self, run_dir: Path, *, enabled: bool, start: int, stop: int) -> None:
        self.enabled, self.run_dir = enabled, run_dir
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        for name in ("metrics.jsonl", "validation.jsonl"):
            self._drop_after(start, run_dir / name)
        self._jsonl = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1)
        self._bar = tqdm(total=stop, initial=start, desc="train", unit="step", dynamic_ncols=True)

    def step(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.enabled:
            self._bar.update(step - self._bar.n)

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Report the numbers of a step; ``loss`` is None where no step could be taken."""
        if not self.enabled:
            return
        self._jsonl.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        loss = "none" if values["loss"] is None else f"{values['loss']:.4f}"
        shown = {"loss": loss, "s/step": f"{values['step_time']:.2f}"}
        shown |= {"tokens/s": f"{values['tokens_per_s']:.3g}", "waits for data": f"{values['data_wait']:.0%}"}
        self._bar.set_postfix(shown, refresh=False)

    def close(self) -> None:
        if self.enabled:
            self._bar.close()
            self._board.close()
            self._jsonl.close()
            draw_loss(self.run_dir)

    def validated(self, step: int, losses: list[float] | None, folder: Path) -> None:
        """Report a validation: the held-out loss in each bin of timesteps, and the videos written to ``folder``."""
        if not self.enabled:
            return
        if losses is not None:
            mean = sum(losses) / len(losses)
            with (self.run_dir / "validation.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean, "loss_by_bin": losses}) + "\n")
            self._board.add_scalar("validation/loss", mean, step)
            for k, loss in enumerate(losses):
                self._board.add_scalar(f"validation/loss of bin {k + 1} of {len(losses)}", loss, step)
        for described in sorted(folder.glob("*.json")):
            facts = json.loads(described.read_text())
            _show(self._board, described.with_suffix("." + facts["format"]), facts, step)

    def _drop_after(self, step: int, path: Path) -> None:
        """Forget what a former attempt reported beyond the step that this one starts from."""
        if path.is_file():
            kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            path.write_text("".join(line + "\n" for line in kept))


def _show(board: Any, path: Path, facts: dict[str, Any], step: int) -> None:
    """Put a video into TensorBoard, as the GIF that its own ``add_video`` would need moviepy to make."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames = read_frames(path)
    images = [Image.fromarray(frame) for frame in frames]
    gif = io.BytesIO()
    images[0].save(gif, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / facts["fps"]), loop=0)
    height, width = frames.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif.getvalue())
    summary = Summary(value=[Summary.Value(tag=f"validation/{path.stem}", image=image)])
    board.file_writer.add_summary(summary, step)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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
    axes.plot(steps[len(steps) - len(mean) :], mean, color="tab:blue", label=f"running mean, {WINDOW:.0%} of the run")
    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log", title=run_dir.name)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def log_to(run_dir: Path, *, enabled: bool) -> None:
    """Send the package's log to ``train.log`` and the terminal; on ranks that do not report, only warnings."""
    LOGGER.setLevel(logging.INFO if enabled else logging.WARNING)
    LOGGER.propagate = False
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if enabled:
        handlers.append(logging.FileHandler(run_dir / "train.log"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        LOGGER.addHandler(handler)
