"""Parts of the page as HTML: jobs, videos, placed references."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from opensora_sp.training.metrics import VIDEOS

from .folders import video_of
from .form import Job

COLUMNS = 8  # validations whose videos are shown
ENDED = 8  # jobs that have ended and are still shown
IDLE = "<p>Choose a checkpoint, type a prompt, press Enter. Empty fields have the run's values.</p>"


def alert(error: Exception | str) -> str:
    """An error, with a line for each of its parts."""
    text = str(error).replace("; ", ";\n")
    return f"<pre role='alert'>{html.escape(text)}</pre>"


def queue(jobs: Sequence[Job], ahead_of: Callable[[Job], int]) -> str:
    """The jobs of a tab: first the living ones in their order, then the newest that have ended."""
    living = [job for job in jobs if not job.has_ended]
    ended = [job for job in reversed(jobs) if job.has_ended]
    shown = [progress(job, ahead_of(job)) for job in living]
    shown += [progress(job) for job in ended[:ENDED]]
    return "".join(shown) or IDLE


def progress(job: Job, ahead: int = 0) -> str:
    """The state of a job; ``ahead`` jobs come before it."""
    prompt, seed = (html.escape(str(job.values.get(key) or "")) for key in ("prompt", "seed"))
    title = f"<p><b>{prompt}</b> seed {seed}</p>"
    if job.state == "failed":
        return f"<article>{title}{alert(job.error)}</article>"
    done, total = job.steps
    running = f"step {done} of {total}" if total else "loading the model"
    if job.seconds_left is not None:
        running += f", {timedelta(seconds=round(job.seconds_left))} left"
    if job.cancelled.is_set():
        running = "cancelling after this step"
    if done == total > 0:
        running = "decoding the video"
    texts = {"running": running, "waiting": f"waiting for {ahead} before it"}
    shown = f"{title}<p role='status'>{texts.get(job.state, job.state)}</p>"
    if job.state == "running":
        shown += f"<progress aria-label='steps' value='{done}' max='{total or 1}'></progress>"
        png = base64.b64encode(job.preview).decode()
        shown += f"<img alt='preview' src='data:image/png;base64,{png}'>" if png else ""
    return f"<article>{shown}</article>"


def figure(path: Path, caption: str) -> str:
    """A video that plays, or an image, above its caption."""
    source = f"src='media?path={quote(str(path))}'"
    shown = f"<video aria-label=sample controls loop muted autoplay playsinline {source}></video>"
    if path.suffix != ".mp4":
        shown = f"<img alt='sample' {source}>"
    return f"<figure>{shown}<figcaption>{html.escape(caption)}</figcaption></figure>"


def frames(parts: Sequence[Sequence[tuple[int, float]]]) -> str:
    """The latent frames of a video, a row for each part, with the references that set them."""
    shown = ""
    for number, part in enumerate(parts, 1):
        boxes, texts = "", [f"part {number} of {len(parts)}"]
        for frame, (reference, edit) in enumerate(part):
            # A reference that does not set it, and one that is the part before, have no number.
            text = "&middot;" if edit == 1 else str(reference + 1) if reference >= 0 else "&larr;"
            boxes += f"<span data-edit='{edit:g}'>{text}</span>"
            texts += [f"frame {frame} by reference {reference + 1}"] * (reference >= 0)
        shown += f"<p class='frames' role='img' aria-label='{', '.join(texts)}'>{boxes}</p>"
    legend = "numbers are references, stripes are regenerated in part, dots are noise"
    return f"{shown}<p>Latent frames: {legend}.</p>"


def videos(runs: Mapping[str, Path]) -> str:
    """Rows by prompt and run, from the newest validation to older ones."""
    rows: dict[tuple[str, str], str] = {}
    for name, run in runs.items():
        for folder in sorted((run / VIDEOS).glob("step_" + "[0-9]" * 8), reverse=True)[:COLUMNS]:
            for metadata in sorted(folder.glob("*.json")):
                video, key = video_of(metadata), (metadata.stem, name)
                if video is not None:
                    step = f"step {int(folder.name.removeprefix('step_'))}"
                    rows[key] = rows.get(key, "") + figure(video, step)
    shown = ""
    for (prompt, name), row in sorted(rows.items()):
        shown += f"<h4>{html.escape(f'{prompt} | {name}')}</h4><div class='row'>{row}</div>"
    return shown
