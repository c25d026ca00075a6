"""The page, in Gradio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from opensora_sp.common.files import read_json

from . import views
from .folders import Folders
from .jobs import Job, Queue

# Seconds between two looks at a job, at runs, and at uploads, which are kept for so long.
POLL, REFRESH, KEPT = 0.3, 3.0, (3600, 24 * 3600)
CSS = """
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.row { display: flex; overflow-x: auto; gap: 1rem; } .row figure { flex: 0 0 9rem; margin: 0; }
progress, .curves img, .row video, .row img { width: 100%; } video, img { max-width: 100%; }
#shown video, #shown img, #progress img { width: 24rem; } .or { color: inherit !important; }
pre[role=alert] { color: var(--error-text-color); white-space: pre-wrap; overflow-wrap: anywhere; }
body:not(.dark) { --color-accent: #2563eb; --button-primary-background-fill: #1d4ed8; }
body:not(.dark) { --input-placeholder-color: #6b7280; } .dark { --input-placeholder-color: #aaa; }
#metadata span { color: inherit; }
"""
# Config key -> label, and an example.
FIELDS = {
    "resolution": ("Size", "e.g. 128x192"),
    "aspect_ratio": ("Aspect ratio", "e.g. 9:16"),
    "num_frames": ("Frames", "e.g. 16 or 2s"),
    "fps": ("FPS", "e.g. 24"),
    "scheduler.num_sampling_steps": ("Steps", "e.g. 30"),
    "scheduler.cfg_scale": ("Guidance", "e.g. 7.0"),
    "seed": ("Seed", "e.g. 42"),
}


def build(folders: Folders, queue: Queue) -> gr.Blocks:
    """The page over these folders and this queue."""
    page = gr.Blocks(title="opensora-sp studio", analytics_enabled=False, delete_cache=KEPT)
    with page:
        gr.Markdown("# opensora-sp studio")
        with gr.Tab("Sample"):
            _sampling(folders, queue, page)
        with gr.Tab("Runs"):
            _training(folders, page)
    return page


def _sampling(folders: Folders, queue: Queue, page: gr.Blocks) -> None:
    running, fields = gr.State(None), dict[str, Any]()
    with gr.Row():
        with gr.Column():
            fields["ckpt"] = _chooser("Checkpoint", folders.weights(), folders)
            fields["prompt"] = _text("Prompt", "a red circle moving left on a white background")
            fields["negative_prompt"] = _text("Negative prompt", "what the video should not show")
            with gr.Row():
                fields |= {key: _text(*texts, min_width=120) for key, texts in FIELDS.items()}
            with gr.Accordion("References and LoRA", open=False):
                files: dict[str, Any] = dict(file_count="multiple", file_types=["image", "video"])
                fields["reference_path"] = gr.File(label="References", height=150, **files)
                fields["mask_strategy"] = _text("Mask strategy: frames they set", "0,0,0,0,1,0")
                fields["lora"] = _chooser("LoRA: PATH or PATH:SCALE, several with ;", [], folders)
            with gr.Row():
                start, cancel = gr.Button("Sample", variant="primary"), gr.Button("Cancel")
        with gr.Column():
            state, shown = gr.HTML(views.IDLE, elem_id="progress"), gr.HTML(elem_id="shown")
            history = _chooser("History", [], folders)
            metadata = gr.JSON(label="Metadata", elem_id="metadata", max_height=384)

    async def sample(*texts: Any) -> AsyncIterator[Any]:
        values = dict(zip(fields, texts, strict=True))
        values["reference_path"] = ";".join(values["reference_path"] or ())
        loras = (values["lora"] or "").split(";")
        values["lora"] = [lora.strip() for lora in loras if lora.strip()]
        job = Job(values)
        try:
            # It can be cancelled meanwhile.
            yield job, views.progress(job), *[gr.skip()] * 3
            await asyncio.to_thread(queue.submit, job)
            while not job.has_ended:
                yield job, views.progress(job, queue.ahead_of(job)), "", None, gr.skip()
                await asyncio.sleep(POLL)
        finally:
            # Nobody else can cancel it once the tab is closed.
            job.cancel()
        yield None, views.progress(job), *show(job.video), listed(folders.history(), job.video)

    def show(path: str | Path | None) -> tuple[Any, Any]:
        if not path:
            return gr.skip(), gr.skip()
        try:
            video = folders.checked(path)
            return views.player(video), read_json(video.with_suffix(".json"))
        except (ValueError, OSError) as error:
            return views.alert(error), gr.skip()

    def listed(paths: Sequence[Path], chosen: Path | None = None) -> Any:
        choice: dict[str, Any] = {"value": str(chosen)} if chosen else {}
        return gr.Dropdown(choices=_names(paths, folders), **choice)

    def refresh() -> list[Any]:
        return [listed(find()) for find in (folders.weights, folders.adapters, folders.history)]

    inputs, outputs = list(fields.values()), [running, state, shown, metadata, history]
    events, quiet = [start.click, fields["prompt"].submit], "hidden"
    gr.on(events, sample, inputs, outputs, concurrency_limit=None, show_progress=quiet)
    cancel.click(lambda job: job and job.cancel(), running, None, show_progress=quiet, queue=False)
    history.input(show, history, [shown, metadata], show_progress=quiet)
    page.load(refresh, None, [fields["ckpt"], fields["lora"], history], show_progress=quiet)


def _text(label: str, example: str, **options: Any) -> gr.Textbox:
    return gr.Textbox(label=label, placeholder=example, lines=1, max_lines=1, **options)


def _training(folders: Folders, page: gr.Blocks) -> None:
    names = _names(folders.trained(), folders)
    runs = gr.CheckboxGroup(names, value=[path for _, path in names[:1]], label="Runs")
    curves, videos, before = gr.HTML(), gr.HTML(), gr.State([None] * 3)

    def show(chosen: list[str] | None, seen: list[Any]) -> list[Any]:
        """Updates of what has changed: a video that is shown again would start anew."""
        try:
            paths = [folders.checked(run) for run in chosen or ()]
            choices, shown = _names(folders.trained(), folders), "".join(map(views.videos, paths))
        except (ValueError, OSError) as error:
            return [gr.skip(), views.alert(error), "", [None] * 3]
        living = [path for _, path in choices if path in (chosen or ())]  # others were removed
        state = [choices, views.changes([str(path) for path in paths]), shown]
        is_new = [new != old for new, old in zip(state, seen, strict=True)]
        return [
            gr.CheckboxGroup(choices, value=living) if is_new[0] else gr.skip(),
            views.curves(paths) if is_new[1] else gr.skip(),
            shown if is_new[2] else gr.skip(),
            state,
        ]

    events, outputs = [page.load, gr.Timer(REFRESH).tick, runs.change], [runs, curves, videos]
    gr.on(events, show, [runs, before], [*outputs, before], show_progress="hidden")


def _chooser(label: str, paths: Sequence[Path], folders: Folders) -> gr.Dropdown:
    """A list that changes later on, or other text: whoever takes the value checks it."""
    options: dict[str, Any] = dict(value=str(paths[0]) if paths else None, interactive=True)
    return gr.Dropdown(_names(paths, folders), label=label, allow_custom_value=True, **options)


def _names(paths: Sequence[Path], folders: Folders) -> list[tuple[str, str]]:
    """Paths as choices, shown from the last part of the chosen folder on."""
    roots = [root.parent for root in (*folders.runs, folders.outputs)]
    root_of = {path: next(root for root in roots if path.is_relative_to(root)) for path in paths}
    return [(str(path.relative_to(root)), str(path)) for path, root in root_of.items()]
