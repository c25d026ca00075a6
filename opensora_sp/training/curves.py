"""Training runs as their folders show them: state, config and curves, also while they train."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opensora_sp.checkpoint.paths import LOG
from opensora_sp.common.files import open_regular, parse_json, read_small_file
from opensora_sp.runtime.run_lock import LOCK, STALE_AFTER

from .metrics import RANKS, read_lines, read_validations

State = Literal["running", "stalled", "ended", "stopped", "failed"]
FILES = ("metrics.jsonl", "validation.jsonl", "sessions.jsonl", RANKS, "summary.json", LOCK)
MAX_CONFIG = 1 << 20  # bytes
TAIL = 20_000  # bytes of a file's end that are read for a run's state
# Without a line for so many seconds, and so many times what one takes, a run is stalled.
PATIENCE, INTERVALS = 120.0, 5.0
OLDER = 4  # validations before the newest whose losses by timestep are drawn
COLORS = [
    "#3b82f6",
    "#f97316",
    "#22a34a",
    "#ef4444",
    "#a855f7",
    "#a16207",
    "#ec4899",
    "#0d9488",
    "#84a90b",
    "#6b7280",
]
FAINT = "55"  # opacity of a color, in hexadecimal


@dataclass(frozen=True)
class Status:
    """What a run does, and its newest numbers; empty before it has logged any."""

    state: State
    began: str
    stop: int
    last: Mapping[str, Any]

    @classmethod
    def read(cls, run: Path) -> Status:
        sessions, lines = _newest(run / "sessions.jsonl"), _newest(run / "metrics.jsonl")
        session, last = (lines_[-1] if lines_ else {} for lines_ in (sessions, lines))
        log = _tail(run / LOG)
        steps = lines[-1]["step"] - lines[-2]["step"] if len(lines) > 1 else 0
        interval = steps * (last.get("step_time") or 0.0)
        state = _state(run, log.rpartition("\n")[2], interval)
        return cls(state, session.get("began", ""), session.get("stop", 0), last)


def _state(run: Path, last_line: str, interval: float) -> State:
    ages = {name: time.time() - modified(run / name) / 1e9 for name in FILES}
    if ages["summary.json"] < ages["sessions.jsonl"]:
        return "ended"
    # A run removes its lock, unless it is killed; it is refreshed while a run lives.
    if ages[LOCK] > STALE_AFTER:
        return "stopped" if "stopped after step" in last_line else "failed"
    quiet = min(ages["metrics.jsonl"], ages["validation.jsonl"], ages["sessions.jsonl"])
    return "stalled" if quiet > PATIENCE + INTERVALS * interval else "running"


def _tail(path: Path) -> str:
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text: str = file.read(TAIL).decode(errors="replace")
        return text.rstrip("\n")
    return ""


def _newest(path: Path) -> list[dict[str, Any]]:
    """The last lines of a JSONL file that have a step."""
    lines = []
    for text in _tail(path).splitlines():
        # The first may be cut.
        with suppress(ValueError):
            line = parse_json(text.encode(), f"a line of {path}")
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def modified(path: Path) -> int:
    """When a file was written, in ns; 0 where there is none, for a run may be removed."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def changes(runs: Sequence[Path]) -> list[int]:
    """Differs where runs have new numbers."""
    return [modified(run / name) for run in runs for name in FILES[:4]]


def config_of(run: Path) -> dict[str, Any]:
    """The settings in a run's ``config.py``, which is read, not executed."""
    settings = dict[str, Any]()
    with suppress(ValueError, OSError, SyntaxError):
        text = read_small_file(run / "config.py", MAX_CONFIG, "the config of a run")
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign):
                settings[ast.unparse(statement.targets[0])] = ast.literal_eval(statement.value)
    return settings


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        points: x and y; y is None where it was not measured.
        is_faint: it is in the background, and smoothed by nobody.
    """

    label: str
    points: Sequence[tuple[float, float | None]]
    is_faint: bool = False


Lines = Callable[[Path], list[Line]]


def _metric(file: str, key: str) -> Lines:
    def read(run: Path) -> list[Line]:
        return [Line("", [(line["step"], line.get(key)) for line in read_lines(run / file)])]

    return read


def _by_timestep(run: Path) -> list[Line]:
    """The newest validation, and faintly the ones before."""
    lines = []
    for age, line in enumerate(reversed(read_validations(run)[-1 - OLDER :])):
        losses = line["loss_by_bin"]
        points = [((number + 0.5) / len(losses), loss) for number, loss in enumerate(losses)]
        lines.append(Line(f", step {line['step']}", points, is_faint=age > 0))
    return lines


def _idle(run: Path) -> list[Line]:
    """The share of its time in which each rank waits, for clips or for others, and their mean."""
    shares: dict[int, list[tuple[float, float | None]]] = {}
    mean = list[tuple[float, float | None]]()
    for line in read_lines(run / RANKS, "data_wait", "communication"):
        waits = [a + b for a, b in zip(line["data_wait"], line["communication"])]
        # The number of ranks may differ where a run was resumed.
        for rank, wait in enumerate(waits):
            shares.setdefault(rank, []).append((line["step"], wait))
        mean.append((line["step"], sum(waits) / len(waits)))
    ranks = [Line(f", rank {rank}", points, is_faint=True) for rank, points in shares.items()]
    return [*ranks, Line("", mean)]


CURVES: dict[str, Lines] = {
    "training loss": _metric("metrics.jsonl", "loss"),
    "held-out loss": _metric("validation.jsonl", "loss"),
    "held-out loss by timestep": _by_timestep,
    "speed: tokens per second": _metric("metrics.jsonl", "tokens_per_s"),
    "memory: largest peak of a rank, GB": _metric("metrics.jsonl", "peak_memory_gb"),
    "idle time: share of each rank": _idle,
}
BY_TIMESTEP = "held-out loss by timestep"


def traces(title: str, runs: Mapping[str, Path], *, smoothing: float) -> list[dict[str, Any]]:
    """The lines of one of ``CURVES``, for runs by their names, as Plotly's JSON has them.

    Args:
        smoothing: weight of the past in the exponential moving average over steps, 0 for none; what
            was measured is then drawn faintly.
    """
    drawn = list[dict[str, Any]]()
    for number, (name, run) in enumerate(runs.items()):
        color, lines = COLORS[number % len(COLORS)], list[Line]()
        # A run that cannot be read is left out.
        with suppress(ValueError, OSError, TypeError, KeyError):
            lines = CURVES[title](run)
        for line in lines:
            is_smoothed = smoothing > 0 and not (line.is_faint or title.startswith("held-out"))
            if is_smoothed:
                measured = Line(f"{line.label}, measured", line.points, is_faint=True)
                drawn += _traces(name, measured, color, 0.0)
            drawn += _traces(name, line, color, smoothing if is_smoothed else 0.0)
    return drawn


def _traces(run: str, line: Line, color: str, smoothing: float) -> list[dict[str, Any]]:
    """A line, if it has points, smoothed without the bias of averages towards their start at 0."""
    points = [(x, y) for x, y in line.points if y is not None]
    if not points:
        return []
    means = []
    average = weight = 0.0
    for _, y in points:
        average = smoothing * average + (1 - smoothing) * y
        weight = smoothing * weight + (1 - smoothing)
        means.append(average / weight)
    trace: dict[str, Any] = dict(name=run + line.label, x=[x for x, _ in points], y=means)
    # One point is no line.
    trace["mode"] = "lines" if len(points) > 1 else "markers"
    trace |= dict(line={"color": color + FAINT * line.is_faint}, marker={"color": color})
    # A run's faint lines are hidden and shown with it.
    return [trace | dict(legendgroup=run, showlegend=not line.is_faint)]
