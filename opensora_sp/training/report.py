"""Report of training runs: loss, throughput, memory and shares of time, as a PNG and a HTML page.

Everything is read from the runs' folders (``metrics.jsonl``, ``sessions.jsonl``,
``validation.jsonl``), also while a run is training.
"""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import format_time, plot_loss, read_lines

# Plots beside that of the loss: metrics by the label of their axis, and line styles of these.
PLOTS = {
    "tokens / s": ("tokens_per_s",),
    "peak memory, GB": ("peak_memory_gb",),
    "share of time (MFU: of peak)": ("data_wait", "communication", "mfu"),
}
STYLES = ("-", "--", ":")
# Rows of the table, under the names that they have in the run's files.
SESSION = ("model", "parameters", "precision", "dp_size", "sp_size", "device", "peak_tflops")
MEDIANS = ("loss", "step_time", "tokens_per_s", "mfu", "data_wait", "communication")
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; }}
img {{ width: 100%; }} table {{ border-collapse: collapse; }} pre {{ overflow-x: auto; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; }}
th, td {{ border-bottom: 1px solid #ddd; }}
</style></head><body><h1>{title}</h1>
<img alt="loss, throughput, memory, shares of time" src="data:image/png;base64,{image}">
<table>{table}</table>
{configs}</body></html>
"""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run's folder: metrics by step, sessions (one for each start), validations."""

    folder: Path
    lines: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
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
            sessions=read_lines(folder / "sessions.jsonl"),
            validations=read_lines(folder / "validation.jsonl"),
        )
        if not (run.lines and run.sessions):
            raise ValueError(
                f"got {str(folder)!r}, where no step has been logged yet; expected at least one; "
                "wait for log_every steps"
            )
        return run

    def column(self, key: str) -> np.ndarray:
        """A number of each line; NaN where it was not measured."""
        return np.array([line.get(key) for line in self.lines], dtype=float)

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run was resumed."""
        return sorted({session["step"] for session in self.sessions[1:]})

    def facts(self) -> dict[str, str]:
        """The run's column in the table, by row: the newest session, and its metrics."""
        last, session = self.lines[-1], self.sessions[-1]
        silent = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        state = f"last logged {format_time(silent)} ago"
        if last["step"] >= session["stop"]:
            state = "finished"

        facts = {"steps": f"{last['step']} of {session['stop']}, {state}"}
        for key in SESSION:
            facts[key] = str(session[key])
        facts["resumed after step"] = ", ".join(map(str, self.resumed_at)) or "-"

        best = min(self.validations, key=lambda line: line["loss"], default=None)
        lowest = f"{best['loss']:.4f} at step {best['step']}" if best else "-"
        facts["lowest validation loss"] = lowest
        facts["peak_memory_gb"] = f"{last['peak_memory_gb']:.2f}"
        for key in MEDIANS:
            values = self.column(key)
            measured = values[~np.isnan(values)]
            facts[f"{key}, median"] = f"{np.median(measured):.4g}" if len(measured) else "-"
        return facts


def report(folders: Sequence[Path], into: Path) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` about runs into a folder; returns both paths.

    Raises:
        ValueError: if a folder is not one of a run, or nothing has been logged there yet.
    """
    runs = [RunRecord.read(folder) for folder in folders]
    into.mkdir(parents=True, exist_ok=True)
    png, page = into / "report.png", into / "report.html"
    draw(runs, png)
    page.write_text(to_html(runs, png), encoding="utf-8")
    return png, page


def draw(runs: Sequence[RunRecord], png: Path) -> None:
    """Four plots: loss, throughput, memory, shares of time; a color for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), dpi=100, layout="constrained")
    loss, *others = figure.subplots(2, 2).flat
    for number, run in enumerate(runs):
        color = f"C{number}"
        plot_loss(loss, run.lines, color=color, label=str(run.folder))
        for line in run.validations:
            loss.plot(line["step"], line["loss"], "o", color=color, markersize=4)

        for axes, metrics in zip(others, PLOTS.values(), strict=True):
            for metric, style in zip(metrics, STYLES):
                # The legend names the curves of the first run.
                label = None if number else metric
                values = run.column(metric)
                axes.plot(run.column("step"), values, style, color=color, label=label)
        for axes in figure.axes:
            for step in run.resumed_at:
                axes.axvline(step, color=color, alpha=0.4, linestyle="dashdot")

    for axes, unit in zip(others, PLOTS, strict=True):
        axes.set(xlabel="optimizer step", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(png)


def to_html(runs: Sequence[RunRecord], png: Path) -> str:
    """The page: the picture inside of it, a table of the runs, and their configs."""
    columns = [run.facts() for run in runs]
    names = [str(run.folder) for run in runs]
    table = _row("", names, "th")
    for fact in columns[0]:
        table += _row(fact, (column[fact] for column in columns), "td")

    configs = ""
    for run in runs:
        file = run.folder / "config.py"
        if file.is_file():
            text = html.escape(file.read_text(encoding="utf-8"))
            summary = f"config of {html.escape(str(run.folder))}"
            configs += f"<details><summary>{summary}</summary><pre>{text}</pre></details>\n"

    return PAGE.format(
        title=html.escape("Training: " + ", ".join(names)),
        image=base64.b64encode(png.read_bytes()).decode(),
        table=table,
        configs=configs,
    )


def _row(name: str, cells: Iterable[str], tag: str) -> str:
    row = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr><th>{html.escape(name)}</th>{row}</tr>\n"
