"""Records and plots of training runs, read from their folders, also while they train.

Several runs may share a plot. Each function draws a run into axes whose x is the optimizer step,
unless it says otherwise.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import RANKS, plot_loss, read_lines, read_validations

OLDER = 8  # validations whose losses by timestep are drawn
LABELS = 40  # that a legend has at most


@dataclass(frozen=True)
class RunRecord:
    """The files of a run's folder: metrics by step, and validations."""

    folder: Path
    lines: list[dict[str, Any]]
    validations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Raises ValueError if the folder is not one of a run, or nothing has been logged yet."""
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(
                f"got {str(folder)!r}, which holds no metrics.jsonl; expected the folder of a "
                "training run; pass outputs of its config"
            )

        run = cls(
            folder,
            lines=read_lines(folder / "metrics.jsonl"),
            validations=read_validations(folder),
        )
        if not run.lines:
            raise ValueError(
                f"got {str(folder)!r}, where no step has been logged yet; expected at least one; "
                "wait for log_every steps"
            )
        return run

    def column(self, key: str) -> np.ndarray:
        """A number of each line; NaN where it was not measured."""
        return np.array([line.get(key) for line in self.lines], dtype=float)


Draw = Callable[[Any, RunRecord, str], None]
"""``draw(axes, run, color)``"""


def picture(title: str, runs: Sequence[RunRecord]) -> str:
    """An HTML image of one of ``CURVES``, with a color for each run; "" if none has a curve."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    spectrum = colormaps["turbo"]
    figure = Figure(figsize=(4.8, 3.2), dpi=110, layout="constrained")
    axes, png = figure.subplots(), io.BytesIO()
    axes.set(xlabel="optimizer step")
    axes.grid(alpha=0.3)
    for number, run in enumerate(runs):
        # Ten colors are distinct; among more, neighbours are alike, but no two are the same.
        color = f"C{number}" if len(runs) <= 10 else to_hex(spectrum(number / len(runs)))
        CURVES[title](axes, run, color)
    axes.set(title=title, ylabel="")
    labels = len(axes.get_legend_handles_labels()[0])
    if labels == 0:
        return ""
    if labels <= LABELS:
        figure.set_figheight(3.2 + 0.1 * labels)
        figure.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    figure.savefig(png, format="png")
    source = base64.b64encode(png.getvalue()).decode()
    return f"<img alt='{title}' src='data:image/png;base64,{source}'>"


def _loss(axes: Any, run: RunRecord, color: str) -> None:
    plot_loss(axes, run.lines, color=color, label=run.folder.name)


def _heldout(axes: Any, run: RunRecord, color: str) -> None:
    steps, losses = ([line[key] for line in run.validations] for key in ("step", "loss"))
    if steps:
        axes.plot(steps, losses, "o-", color=color, markersize=3, label=run.folder.name)


def _heldout_by_timestep(axes: Any, run: RunRecord, color: str) -> None:
    """The newest validation, and faintly the earlier ones."""
    for age, line in enumerate(reversed(run.validations[-OLDER:])):
        losses = line["loss_by_bin"]
        middles = (np.arange(len(losses)) + 0.5) / len(losses)
        label = None if age else f"{run.folder.name}, step {line['step']}"
        axes.plot(middles, losses, ".-", color=color, alpha=0.25 if age else 1, label=label)
    axes.set(xlabel="timestep, from data (0) to noise (1)")


def _metric(key: str) -> Draw:
    def draw(axes: Any, run: RunRecord, color: str) -> None:
        axes.plot(run.column("step"), run.column(key), color=color, label=run.folder.name)
        axes.axhline(0, color="grey", linewidth=0.8)  # a part of the range

    return draw


def _idle(axes: Any, run: RunRecord, color: str) -> None:
    """The share of its time in which each rank waits, for data or for others."""
    lines = read_lines(run.folder / RANKS)
    steps = [line["step"] for line in lines]
    for rank in range(len(lines[-1]["data_wait"]) if lines else 0):
        # The number of ranks may differ where a run was resumed.
        waits = [
            line["data_wait"][rank] + line["communication"][rank]
            if rank < len(line["data_wait"])
            else np.nan
            for line in lines
        ]
        style = ("-", "--", ":", "-.")[rank % 4]
        axes.plot(steps, waits, style, color=color, label=f"{run.folder.name}, rank {rank}")
    axes.axhline(0, color="grey", linewidth=0.8)


CURVES: dict[str, Draw] = {
    "training loss": _loss,
    "held-out loss": _heldout,
    "held-out loss by timestep": _heldout_by_timestep,
    "speed: tokens per second": _metric("tokens_per_s"),
    "memory: largest peak of a rank, GB": _metric("peak_memory_gb"),
    "idle time: share of each rank": _idle,
}
