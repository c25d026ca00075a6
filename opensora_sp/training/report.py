"""Report of training runs: loss, throughput, memory and shares of time, as a PNG and a HTML page.

Everything is read from the runs' folders (``metrics.jsonl``, ``sessions.jsonl``,
``validation.jsonl``), also while a run is training.
"""

from __future__ import annotations

import base64
import html
import io
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import format_time, read_lines, running_mean

# Ratio of the limits of the loss axis under which its ticks are plain numbers.
FEW_TICKS = 20
# The curves of the fourth plot: metric, legend, line style.
SHARES = (
    ("data_wait", "data wait", "-"),
    ("communication", "communication", "--"),
    ("mfu", "MFU", ":"),
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; }
img { width: 100%; } table { border-collapse: collapse; } pre { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; }
th, td { border-bottom: 1px solid #ddd; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
<img alt="loss, throughput, memory, shares of time" src="data:image/png;base64,{image}">
<table><tr><th></th>{head}</tr>{rows}</table>
{configs}</body></html>
"""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run's folder: metrics by step, sessions (one for each start), validations."""

    folder: Path
    name: str
    lines: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    validations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> RunRecord:
        """Raises ValueError if the folder is not one of a run, or nothing has been logged yet."""
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(
                f"got {str(folder)!r}, which holds no metrics.jsonl; expected the folder of a "
                "training run; pass outputs of its config"
            )
        files = [folder / f"{name}.jsonl" for name in ("metrics", "sessions", "validation")]
        lines, sessions, validations = (read_lines(p) if p.is_file() else [] for p in files)
        if not lines:
            raise ValueError(
                f"got {str(folder)!r}, where no step has been logged yet; expected at least one; "
                "wait for log_every steps"
            )
        return cls(folder, name or folder.resolve().name, lines, sessions, validations)

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values, of the lines that have this number."""
        lines = [line for line in self.lines if line.get(key) is not None]
        steps = np.array([line["step"] for line in lines])
        return steps, np.array([line[key] for line in lines], dtype=float)

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run was resumed, as far as they are part of the curve."""
        done = self.lines[-1]["step"]
        return sorted({session["step"] for session in self.sessions[1:] if session["step"] <= done})

    def facts(self) -> dict[str, str]:
        """The run's column in the table, by row."""
        last, session = self.lines[-1], self.sessions[-1] if self.sessions else {}
        stop = session.get("stop", last["step"])
        silent = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        state = "finished" if last["step"] >= stop else f"last logged {format_time(silent)} ago"
        facts = {"steps": f"{last['step']} of {stop}, {state}"}

        if session:
            millions = session["parameters"] / 1e6
            sizes = f"dp_size {session['dp_size']} x sp_size {session['sp_size']}"
            facts["model"] = f"{session['model']}, {millions:.1f} M parameters"
            facts["model"] += f", {session['precision']}"
            facts["processes"] = f"{sizes}, {session['device']}"
            facts["began"] = self.sessions[0]["began"]
        if self.resumed_at:
            facts["resumed after step"] = ", ".join(map(str, self.resumed_at))

        facts["loss, mean of the last tenth"] = f"{running_mean(self.column('loss')[1])[-1]:.4f}"
        if self.validations:
            best = min(self.validations, key=lambda line: line["loss"])
            facts["validation loss, lowest"] = f"{best['loss']:.4f} at step {best['step']}"
        return facts | self._medians(session.get("peak_tflops"))

    def _medians(self, peak_tflops: float | None) -> dict[str, str]:
        of_peak = f" of {peak_tflops:g} TFLOP/s" if peak_tflops else ""
        rows = {
            "step_time": ("step time, median", "{:.3g} s"),
            "tokens_per_s": ("tokens per second, median", "{:.4g}"),
            "mfu": ("MFU, median", "{:.1%}" + of_peak),
            "data_wait": ("data wait, median", "{:.1%}"),
            "communication": ("communication, median", "{:.1%}"),
            "peak_memory_gb": ("peak memory, largest of all ranks", "{:.2f} GB"),
        }
        facts = {}
        for key, (name, form) in rows.items():
            values = self.column(key)[1].tolist()
            if values:
                combine = max if key == "peak_memory_gb" else statistics.median
                facts[name] = form.format(combine(values))
        return facts


def report(folders: Sequence[Path], into: Path) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` about runs into a folder; returns both paths.

    Raises:
        ValueError: if a folder is not one of a run, or nothing has been logged there yet.
    """
    distinct = {folder.resolve().name for folder in folders}
    # Runs of the same name are distinguished by their paths.
    by_path = len(distinct) < len(folders)
    runs = [RunRecord.read(folder, str(folder) if by_path else None) for folder in folders]

    picture = draw(runs)
    into.mkdir(parents=True, exist_ok=True)
    png, page = into / "report.png", into / "report.html"
    png.write_bytes(picture)
    page.write_text(to_html(runs, picture), encoding="utf-8")
    return png, page


def draw(runs: Sequence[RunRecord]) -> bytes:
    """The four plots as a PNG: loss, throughput, memory, shares of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), dpi=100, layout="constrained")
    loss, speed, memory, shares = axes.flat
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"] * len(runs)
    for run, colour in zip(runs, colours):
        _draw_loss(loss, run, colour)
        speed.plot(*run.column("tokens_per_s"), color=colour, linewidth=1)
        memory.plot(*run.column("peak_memory_gb"), color=colour, linewidth=1.5)
        for key, name, style in SHARES:
            steps, values = run.column(key)
            if len(steps):
                shares.plot(steps, 100 * values, style, color=colour, linewidth=1, label=name)
        for plot in axes.flat:
            for step in run.resumed_at:
                plot.axvline(step, color=colour, linewidth=0.8, alpha=0.4, linestyle="dashdot")

    loss.set(ylabel="loss", yscale="log")
    _readable_ticks(loss)
    speed.set(ylabel="tokens / s", ylim=(0, 1.1 * speed.dataLim.ymax))
    memory.set(ylabel="peak memory, GB", ylim=(0, 1.1 * memory.dataLim.ymax))
    shares.set(ylabel="% of time (MFU: of peak)", ylim=(0, 100))
    loss.legend(fontsize=8)
    # Of the lines of all runs, the legend names each kind once.
    handles, names = shares.get_legend_handles_labels()
    kinds = dict(zip(names, handles))
    shares.legend(kinds.values(), kinds.keys(), fontsize=8)
    for plot in axes.flat:
        plot.set(xlabel="optimizer step")
        plot.grid(which="both", alpha=0.3)

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def _draw_loss(axes: Any, run: RunRecord, colour: str) -> None:
    """A faint line as logged, a strong one of the running mean, and dots for validation."""
    steps, losses = run.column("loss")
    mean = running_mean(losses)
    axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(steps[len(steps) - len(mean) :], mean, color=colour, label=run.name)
    if run.validations:
        x, y = zip(*((line["step"], line["loss"]) for line in run.validations))
        axes.plot(x, y, "o", color=colour, markersize=4, label=f"{run.name}, validation")


def _readable_ticks(axes: Any) -> None:
    """Plain numbers instead of powers of ten, where a logarithmic axis spans few of these."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    low, high = axes.get_ylim()
    if high < FEW_TICKS * low:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())


def to_html(runs: Sequence[RunRecord], picture: bytes) -> str:
    """The page: the picture inside of it, a table of the runs, and their configs."""
    columns = [run.facts() for run in runs]
    names: dict[str, None] = {}
    for column in columns:
        names |= dict.fromkeys(column)

    rows = []
    for name in names:
        cells = [f"<td>{html.escape(column.get(name, '-'))}</td>" for column in columns]
        rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    return PAGE.format(
        title=html.escape("Training: " + ", ".join(run.name for run in runs)),
        style=STYLE,
        image=base64.b64encode(picture).decode(),
        head="".join(f"<th>{html.escape(run.name)}</th>" for run in runs),
        rows="".join(rows),
        configs="".join(_config(run) for run in runs),
    )


def _config(run: RunRecord) -> str:
    path = run.folder / "config.py"
    if not path.is_file():
        return ""
    summary = f"config of {html.escape(run.name)}"
    text = html.escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>{summary}</summary><pre>{text}</pre></details>\n"
