"""A run, or several, on one page: loss, speed, memory and where the time went, as a PNG and a self-contained HTML page.

All is read from the runs' folders (``metrics.jsonl``, ``sessions.jsonl``, ``validation.jsonl``), which a run that is
still going on has as well.
"""

from __future__ import annotations

import base64
import html
import io
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import read_lines, running_mean, told_time

NARROW = 20  # times the lowest number
SHARES = {"data_wait": "waiting for data", "communication": "waiting for other ranks", "mfu": "MFU"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
img { width: 100%; } table { border-collapse: collapse; } pre { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; border-bottom: 1px solid #ddd; }
"""


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder tells: lines by step, attempts (each from its first step), validations."""

    folder: Path
    name: str
    lines: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    validations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> RunRecord:
        """Raises ValueError if the folder is none of a run, or nothing has been logged yet."""
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(
                f"got {str(folder)!r}, which holds no metrics.jsonl; expected the folder of a training run; pass what "
                "its config says as outputs"
            )
        found = {name: folder / f"{name}.jsonl" for name in ("metrics", "sessions", "validation")}
        lines, sessions, validations = (
            read_lines(p) if p.is_file() else [] for p in found.values()
        )
        if not lines:
            raise ValueError(
                f"got {str(folder)!r}, where no step has been logged yet; expected at least one; wait for log_every "
                "steps"
            )
        return cls(folder, name or folder.resolve().name, lines, sessions, validations)

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values, of the lines that have this number."""
        pairs = [(line["step"], line[key]) for line in self.lines if line.get(key) is not None]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(steps), np.array(values, dtype=float)

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which an attempt other than the first began, as far as they are part of the curve."""
        done = self.lines[-1]["step"]
        return sorted({session["step"] for session in self.sessions[1:] if session["step"] <= done})

    def facts(self) -> dict[str, str]:
        """What the table says, by what it says it of."""
        last, session = self.lines[-1], self.sessions[-1] if self.sessions else {}
        stop = session.get("stop", last["step"])
        silent = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        state = "finished" if last["step"] >= stop else f"last heard of {told_time(silent)} ago"
        facts = {"steps": f"{last['step']} of {stop}, {state}"}
        if session:
            facts |= {
                "model": f"{session['model']}, {session['parameters'] / 1e6:.1f} M parameters, {session['precision']}",
                "processes": f"dp_size {session['dp_size']} x sp_size {session['sp_size']}, {session['device']}",
                "began": self.sessions[0]["began"],
            }
        if self.resumed_at:
            facts["resumed after step"] = ", ".join(map(str, self.resumed_at))
        facts["loss, mean of the last tenth"] = f"{running_mean(self.column('loss')[1])[-1]:.4f}"
        if self.validations:
            best = min(self.validations, key=lambda line: line["loss"])
            facts["validation loss, lowest"] = f"{best['loss']:.4f} at step {best['step']}"
        return {**facts, **self._medians(session.get("peak_tflops"))}

    def _medians(self, peak_tflops: float | None) -> dict[str, str]:
        told = {
            "step_time": ("time of a step, median", "{:.3g} s"),
            "tokens_per_s": ("tokens per second, median", "{:.4g}"),
            "mfu": (
                "MFU, median",
                "{:.1%}" + (f" of {peak_tflops:g} TFLOP/s" if peak_tflops else ""),
            ),
            "data_wait": ("waiting for data, median", "{:.1%}"),
            "communication": ("waiting for other ranks, median", "{:.1%}"),
            "peak_memory_gb": ("memory of the fullest rank, peak", "{:.2f} GB"),
        }
        facts = {}
        for key, (name, form) in told.items():
            values = self.column(key)[1].tolist()
            if values:
                facts[name] = form.format(
                    max(values) if key == "peak_memory_gb" else statistics.median(values)
                )
        return facts


def report(folders: Sequence[Path], into: Path) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` about one run or several into a folder; returns both paths.

    Raises:
        ValueError: if a folder is none of a run, or nothing has been logged there yet.
    """
    names: list[str | None] = [None] * len(folders)
    if len({folder.resolve().name for folder in folders}) < len(
        folders
    ):  # runs named alike: tell them by their paths
        names = [str(folder) for folder in folders]
    runs = [RunRecord.read(folder, name) for folder, name in zip(folders, names, strict=True)]
    picture = draw(runs)
    into.mkdir(parents=True, exist_ok=True)
    png, page = into / "report.png", into / "report.html"
    png.write_bytes(picture)
    page.write_text(to_html(runs, picture), encoding="utf-8")
    return png, page


def draw(runs: Sequence[RunRecord]) -> bytes:
    """The four curves as a PNG: loss, speed, memory, shares of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((loss, speed), (memory, shares)) = plt.subplots(
        2, 2, figsize=(11, 6.4), dpi=100, layout="constrained"
    )
    for run, colour in zip(runs, plt.rcParams["axes.prop_cycle"].by_key()["color"] * len(runs)):
        _draw_loss(loss, run, colour)
        speed.plot(*run.column("tokens_per_s"), color=colour, linewidth=1)
        memory.plot(*run.column("peak_memory_gb"), color=colour, linewidth=1.5)
        for key, style in (("data_wait", "-"), ("communication", "--"), ("mfu", ":")):
            steps, values = run.column(key)
            if len(steps):
                shares.plot(
                    steps, 100 * values, style, color=colour, linewidth=1, label=SHARES[key]
                )
        for axes in (loss, speed, memory, shares):
            for step in run.resumed_at:
                axes.axvline(step, color=colour, linewidth=0.8, alpha=0.4, linestyle="dashdot")
    loss.set(ylabel="loss", yscale="log")
    _readable_ticks(loss)
    for axes, name in ((speed, "tokens / s"), (memory, "peak memory, GB")):
        axes.set(ylabel=name, ylim=(0, 1.1 * axes.dataLim.ymax))
    shares.set(ylabel="% of time (MFU: of peak)", ylim=(0, 100))
    loss.legend(fontsize=8)
    shares.legend(*_once(shares), fontsize=8)
    for axes in (loss, speed, memory, shares):
        axes.set(xlabel="optimizer step")
        axes.grid(which="both", alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def _draw_loss(axes: Any, run: RunRecord, colour: str) -> None:
    """Faint as logged, strong its running mean, dots for validation."""
    steps, losses = run.column("loss")
    mean = running_mean(losses)
    axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(steps[len(steps) - len(mean) :], mean, color=colour, label=run.name)
    if run.validations:
        points = [(line["step"], line["loss"]) for line in run.validations]
        axes.plot(
            *zip(*points, strict=True),
            "o",
            color=colour,
            markersize=4,
            label=f"{run.name}, validation",
        )


def _readable_ticks(axes: Any) -> None:
    """Where a logarithmic axis spans few numbers: 0.4 and 0.6 instead of powers of ten."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    low, high = axes.get_ylim()
    if high < NARROW * low:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())


def _once(axes: Any) -> tuple[Iterable[Any], Iterable[str]]:
    """Handles and labels of a legend that names each kind of line once."""
    kinds = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return kinds.values(), kinds.keys()


def to_html(runs: Sequence[RunRecord], picture: bytes) -> str:
    """The page: the picture inside of it, a table of the runs, and their configs."""
    title = html.escape("Training: " + ", ".join(run.name for run in runs))
    facts = [run.facts() for run in runs]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(one.get(name, '-'))}</td>" for one in facts)
        for name in dict.fromkeys(name for one in facts for name in one)
    )
    configs = "".join(_config(run) for run in runs)
    image = base64.b64encode(picture).decode()
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'</head><body><h1>{title}</h1>\n<img alt="loss, speed, memory, shares of time by optimizer step" '
        f'src="data:image/png;base64,{image}">\n<table><tr><th></th>{head}</tr>{rows}</table>\n{configs}</body></html>\n'
    )


def _config(run: RunRecord) -> str:
    path = run.folder / "config.py"
    if not path.is_file():
        return ""
    text = html.escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>config of {html.escape(run.name)}</summary><pre>{text}</pre></details>\n"
