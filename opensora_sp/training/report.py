"""Report of training runs: loss, throughput, memory and shares of time, as a PNG and a HTML page.

Everything is read from the runs' folders (``metrics.jsonl``, ``sessions.jsonl``,
``validation.jsonl``), also while a run is training.
"""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import format_time, plot_loss, read_lines, running_mean

# The curves of the fourth plot, and their line styles.
SHARES = {"data_wait": "-", "communication": "--", "mfu": ":"}
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
        """The run's column in the table, by row."""
        last, session = self.lines[-1], self.sessions[-1]
        silent = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        state = f"last logged {format_time(silent)} ago"
        if last["step"] >= session["stop"]:
            state = "finished"

        lowest = "-"
        if self.validations:
            best = min(self.validations, key=lambda line: line["loss"])
            lowest = f"{best['loss']:.4f} at step {best['step']}"

        millions, peak = session["parameters"] / 1e6, session["peak_tflops"] or 0
        return {
            "steps": f"{last['step']} of {session['stop']}, {state}",
            "model": f"{session['model']}, {millions:.1f} M parameters, {session['precision']}",
            "processes": "dp_size {dp_size} x sp_size {sp_size}, {device}".format(**session),
            "began": self.sessions[0]["began"],
            "resumed after step": ", ".join(map(str, self.resumed_at)) or "-",
            "loss, mean of the last tenth": self._fact("loss", "{:.4f}", _last_mean),
            "validation loss, lowest": lowest,
            "step time, median": self._fact("step_time", "{:.3g} s"),
            "tokens per second, median": self._fact("tokens_per_s", "{:.4g}"),
            "MFU, median": self._fact("mfu", f"{{:.1%}} of {peak:g} TFLOP/s"),
            "data wait, median": self._fact("data_wait", "{:.1%}"),
            "communication, median": self._fact("communication", "{:.1%}"),
            "peak memory, largest of all ranks": self._fact("peak_memory_gb", "{:.2f} GB", np.max),
        }

    def _fact(self, key: str, form: str, combine: Callable[..., Any] = np.median) -> str:
        """One number of a column, as text."""
        values = self.column(key)
        measured = values[~np.isnan(values)]
        return form.format(combine(measured)) if len(measured) else "-"


def _last_mean(losses: np.ndarray) -> float:
    return float(running_mean(losses)[-1])


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
    """Four plots: loss, throughput, memory, shares of time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), dpi=100, layout="constrained")
    (loss, speed), (memory, shares) = figure.subplots(2, 2)
    for number, run in enumerate(runs):
        color, steps = f"C{number}", run.column("step")
        plot_loss(loss, run.lines, color=color, label=str(run.folder))
        for line in run.validations:
            loss.plot(line["step"], line["loss"], "o", color=color, markersize=4)
        speed.plot(steps, run.column("tokens_per_s"), color=color)
        memory.plot(steps, run.column("peak_memory_gb"), color=color)
        for key, style in SHARES.items():
            # The legend names the lines of the first run.
            label = None if number else key
            shares.plot(steps, 100 * run.column(key), style, color=color, label=label)

        for axes in figure.axes:
            for step in run.resumed_at:
                axes.axvline(step, color=color, alpha=0.4, linestyle="dashdot")

    shares.legend()
    units = {speed: "tokens / s", memory: "peak memory, GB", shares: "% of time (MFU: of peak)"}
    for axes, unit in units.items():
        axes.set(xlabel="optimizer step", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
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
