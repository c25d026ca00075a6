"""Parts of the page as HTML: the progress of a job, a video, training runs."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from opensora_sp.training.curves import CURVES, RunRecord, picture
from opensora_sp.training.metrics import RANKS
from opensora_sp.training.validation import VIDEOS

from .folders import modified, video_of
from .jobs import Job

COLUMNS = 8  # validations whose videos are shown
IDLE = "<p>Choose a checkpoint, type a prompt, press Enter. Empty fields have the run's values.</p>"


def alert(error: Exception | str) -> str:
    """An error, with a line for each of its parts."""
    text = str(error).replace("; ", ";\n")
    return f"<pre role='alert'>{html.escape(text)}</pre>"


def progress(job: Job, ahead: int = 0) -> str:
    """The state of a job; ``ahead`` jobs come before it."""
    if job.state == "failed":
        return alert(job.error)
    done, total = job.steps
    running = f"step {done} of {total}" if total else "loading the model"
    if job.cancelled.is_set():
        running = "cancelling after this step"
    if done == total > 0:
        running = "decoding the video"
    waiting = f"waiting for {ahead} before it" if job.work else "checking the request"
    texts = {"running": running, "waiting": waiting}
    shown = f"<p role='status'>{texts.get(job.state, job.state)}</p>"
    if job.state == "running":
        shown += f"<progress aria-label='steps' value='{done}' max='{total or 1}'></progress>"
        png = base64.b64encode(job.preview).decode()
        shown += f"<img alt='preview' src='data:image/png;base64,{png}'>" if png else ""
    return shown


def player(path: Path) -> str:
    """A video that plays, or an image."""
    url = f"media?path={quote(str(path))}"
    if path.suffix != ".mp4":
        return f"<img alt='sample' src='{url}'>"
    return f"<video aria-label=sample controls loop muted autoplay playsinline src='{url}'></video>"


def changes(runs: Sequence[str]) -> list[str | int]:
    """Differs where runs have new curves."""
    names = ("metrics.jsonl", "validation.jsonl", RANKS)
    return [*runs, *(modified(Path(run, name)) for run in runs for name in names)]


def curves(runs: Sequence[Path]) -> str:
    """Plots with a color for each run."""
    records = list[RunRecord]()
    for run in runs:
        with suppress(ValueError, OSError):  # nothing is logged yet
            records.append(RunRecord.read(run))
    if not records:
        return "<p>Choose runs: those that have logged a step are in the list.</p>"
    return f"<div class='curves'>{''.join(picture(title, records) for title in CURVES)}</div>"


def videos(run: Path) -> str:
    """A row for each prompt, from the newest validation to older ones."""
    rows: dict[str, str] = {}
    for folder in sorted((run / VIDEOS).glob("step_" + "[0-9]" * 8), reverse=True)[:COLUMNS]:
        for metadata in sorted(folder.glob("*.json")):
            video, step = video_of(metadata), int(folder.name.removeprefix("step_"))
            if video is not None:
                figure = f"<figure>{player(video)}<figcaption>step {step}</figcaption></figure>"
                rows[metadata.stem] = rows.get(metadata.stem, "") + figure
    titled = {html.escape(f"{run.name}: {name}"): row for name, row in rows.items()}
    return "".join(f"<h4>{name}</h4><div class='row'>{row}</div>" for name, row in titled.items())
