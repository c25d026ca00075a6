"""The page, in Gradio: its tab Sample, with the history of what was sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.processing_utils import save_file_to_cache
from PIL import Image

from opensora_sp.sampling.outputs import facts_of

from . import form, views
from .folders import Folders, Result, short_names
from .form import FIELDS, Job
from .jobs import Queue
from .page_runs import QUIET, differences, runs_tab

# Seconds between two looks at jobs, at the history, and at uploads, which are kept for so long.
POLL, REFRESH, KEPT = 0.5, 3.0, (3600, 24 * 3600)
MAX_VIDEOS, MAX_DIGITS = 16, 20
CONFIRM = "(label, paths) => [confirm('Delete this video for good?') ? label : null, paths]"


def build(folders: Folders, queue: Queue) -> gr.Blocks:
    """The page over these folders and this queue."""
    page = gr.Blocks(title="opensora-sp studio", analytics_enabled=False, delete_cache=KEPT)
    with page:
        gr.Markdown("# opensora-sp studio")
        with gr.Tab("Sample"), gr.Row():
            with gr.Column():
                fields = _fields(folders, queue, page)
                inputs = [gr.Slider(1, MAX_VIDEOS, 1, step=1, label="Videos"), *fields.values()]
                with gr.Row():
                    buttons = [gr.Button("Sample", variant="primary")]
                    buttons += [gr.Button("Cancel"), gr.Button("Cancel all")]
            with gr.Column():
                listed = gr.HTML(views.IDLE, elem_id="queue")
                history = _history(folders, fields, page)
            _sampling(queue, page, inputs, buttons, [listed, *history])
        with gr.Tab("Runs"):
            runs_tab(folders, page)
    return page


def _fields(folders: Folders, queue: Queue, page: gr.Blocks) -> dict[str, Any]:
    """Fields by config key, which show the run's values and the frames that references set."""
    files: dict[str, Any] = dict(file_count="multiple", file_types=["image", "video"], height=150)
    fields: dict[str, Any] = {"ckpt": _chooser("ckpt", _choices(folders.weights()))}
    with gr.Row():
        for key in list(FIELDS)[1:12]:
            fields[key] = _text(key)
    with gr.Accordion("References and LoRA", open=False):
        fields["reference_path"] = gr.File(label="References", **files)
        fields["mask_strategy"] = _chooser("mask_strategy", form.PLACES, multiselect=True)
        picture = gr.HTML(elem_id="frames")
        fields["lora"] = _chooser("lora", [], multiselect=True)
    # All texts but prompt and seed.
    texts = list(FIELDS)[2:11]

    def refresh(checkpoint: str | None) -> list[Any]:
        found, values = (folders.weights(), folders.adapters()), dict[str, Any]()
        with suppress(ValueError, OSError):  # no checkpoint, or text that is still typed
            work = queue.check({"ckpt": checkpoint, "prompt": "any"})
            values = form.settings_of(facts_of(work.cfg, work.request))
        shown = [gr.Textbox(placeholder=values.get(key) or FIELDS[key][1]) for key in texts]
        return [*(gr.Dropdown(choices=_choices(paths)) for paths in found), *shown]

    def draw(*texts: Any) -> str:
        values = dict(zip(FIELDS, texts, strict=True)) | {"prompt": "any"}
        try:
            return views.frames(form.placed_frames(queue.check(values)))
        except (ValueError, OSError) as error:
            return views.alert(form.worded(error))

    outputs = [fields[key] for key in ("ckpt", "lora", *texts)]
    gr.on([page.load, fields["ckpt"].change], refresh, fields["ckpt"], outputs, **QUIET)
    drawn = [fields[key].change for key in ("mask_strategy", "reference_path", "ckpt")]
    drawn += [fields[key].blur for key in ("num_frames", "resolution", "aspect_ratio")]
    gr.on(drawn, draw, list(fields.values()), picture, **QUIET)
    return fields


def _sampling(
    queue: Queue, page: gr.Blocks, inputs: list[Any], buttons: list[Any], outputs: list[Any]
) -> None:
    """Sample and cancel, each tab its own jobs, which it follows."""
    jobs_of = defaultdict[str | None, list[Job]](list)
    (start, cancel, cancel_all), (listed, chosen, compare, *shown) = buttons, outputs

    async def sample(request: gr.Request, count: int, *texts: Any) -> list[Any]:
        """For each field, the reason if a request is refused for it."""
        values = dict(zip(FIELDS, texts, strict=True))
        seed = values["seed"] or str(secrets.randbelow(1 << 31))
        is_number = seed.isdecimal() and len(seed) <= MAX_DIGITS
        for each in range(int(seed), int(seed) + count) if is_number else [seed]:
            job = Job(values | {"seed": str(each)})
            # It can be cancelled meanwhile.
            jobs_of[request.session_hash].append(job)
            await asyncio.to_thread(queue.submit, job)
            if job.has_ended:
                break
        return [_marked(job.error if key == job.refused_field else "", key) for key in FIELDS]

    def follow(paths: list[str], pair: bool, request: gr.Request) -> list[Any]:
        """The tab's jobs, and its new videos: one that is shown again would start anew."""
        jobs = jobs_of[request.session_hash]
        text = views.queue(jobs, queue.ahead_of)
        videos = [str(job.video) for job in jobs if job.video and job.video.is_file()]
        added = [path for path in videos if path not in paths]
        shown = _shown(paths + added, pair) if added else [gr.skip(), gr.skip()]
        return [text, paths + added if added else gr.skip(), *shown]

    def cancel_jobs(request: gr.Request, count: int | None = None) -> None:
        living = [job for job in jobs_of[request.session_hash] if not job.has_ended]
        for job in living[:count]:
            job.cancel()

    events = [start.click, inputs[2].submit]
    gr.on(events, sample, inputs, inputs[1:], trigger_mode="multiple", **QUIET)
    gr.Timer(POLL).tick(follow, [chosen, compare], [listed, chosen, *shown], **QUIET)
    cancel.click(cancel_jobs, gr.State(1), None, queue=False)
    cancel_all.click(cancel_jobs, None, None, queue=False)
    # Nobody else could cancel them then.
    page.unload(cancel_jobs)


def _history(folders: Folders, fields: dict[str, Any], page: gr.Blocks) -> list[Any]:
    """Returns the paths of the chosen videos, the switch to compare them, and what shows them."""
    shown = gr.HTML(elem_id="shown")
    metadata = gr.JSON(label="Metadata", elem_id="metadata", max_height=256)
    with gr.Row():
        reuse, remove = gr.Button("Use these settings"), gr.Button("Delete")
        compare = gr.Checkbox(label="Compare with the one before")
    looks: dict[str, Any] = dict(columns=3, object_fit="cover", buttons=[], label="History")
    gallery = gr.Gallery(elem_id="history", allow_preview=False, interactive=False, **looks)
    # Paths of videos, in the order of choice.
    chosen, before = gr.State([]), gr.State(None)

    def choose(paths: list[str], pair: bool, event: gr.SelectData) -> list[Any]:
        # By its caption: the list may have changed since.
        caption = event.value["caption"]
        paths = paths + [str(r.video) for r in folders.history() if r.caption == caption]
        return [paths, *_shown(paths, pair)]

    def fill(paths: list[str]) -> list[Any]:
        if not paths:
            return [gr.skip()] * len(FIELDS)
        settings = form.settings_of(Result.read(Path(paths[-1])).facts)
        # Where uploads are: Gradio serves no other files, and removes these.
        files, references = fields["reference_path"], settings["reference_path"]
        copies = [save_file_to_cache(folders.checked(p), files.GRADIO_CACHE) for p in references]
        files.temp_files.update(copies)
        return list((settings | {"reference_path": copies or None}).values())

    def drop(confirmed: str | None, paths: list[str]) -> list[Any]:
        if not confirmed or not paths:
            return [gr.skip()] * 3
        Result.read(Path(paths[-1])).delete()
        return [paths[:-1], "", None]

    def refresh(names: list[str] | None) -> list[Any]:
        """The list, if it has changed: a choice in one that is built anew is lost."""
        results = folders.history()
        now = [each.caption for each in results]
        listed = gr.skip() if now == names else list(zip(map(_sheet, results), now, strict=True))
        return [listed, now]

    outputs = [chosen, shown, metadata]
    gallery.select(choose, [chosen, compare], outputs, **QUIET)
    compare.change(_shown, [chosen, compare], [shown, metadata], **QUIET)
    reuse.click(fill, chosen, list(fields.values()), **QUIET)
    remove.click(drop, [remove, chosen], outputs, js=CONFIRM, **QUIET)
    gr.on([page.load, gr.Timer(REFRESH).tick], refresh, before, [gallery, before], **QUIET)
    return [chosen, compare, shown, metadata]


def _shown(paths: list[str], pair: bool) -> list[Any]:
    """The video chosen last, or the last two, with the metadata or what differs in them."""
    both = dict.fromkeys(paths[-2:] if pair else paths[-1:])
    results = [Result.read(Path(path)) for path in both if Path(path).is_file()]
    shown = "".join(views.figure(each.video, each.caption) for each in results)
    shown = f"<div class='pair'>{shown}</div>"
    if len(results) > 1:
        shown += differences({each.caption: each.facts for each in results})
    return [shown, results[-1].facts if results else None]


def _sheet(result: Result) -> Image.Image:
    """The contact sheet, of which the first frame is shown; gray if it is damaged or deleted."""
    with suppress(OSError), Image.open(result.video.with_suffix(".png")) as sheet:
        return sheet.copy()
    return Image.new("L", (96, 96), 128)


def _marked(error: str, key: str) -> Any:
    """A field with an error, or without one; files have it in their label."""
    marks: dict[str, Any] = dict(elem_classes=["refused"] if error else [])
    if key == "reference_path":
        return gr.update(label=f"References {error}".strip(), **marks)
    return gr.update(info=error, **marks)


def _text(key: str) -> gr.Textbox:
    looks: dict[str, Any] = dict(lines=1, max_lines=1, min_width=400 if "prompt" in key else 120)
    return gr.Textbox("", label=FIELDS[key][0], placeholder=FIELDS[key][1], **looks)


def _chooser(key: str, choices: list[tuple[str, str]], **options: Any) -> gr.Dropdown:
    """A list that changes later on, or other text: whoever takes the value checks it."""
    return gr.Dropdown(choices, label=FIELDS[key][0], allow_custom_value=True, **options)


def _choices(paths: list[Path]) -> list[tuple[str, str]]:
    return [(name, str(path)) for path, name in short_names(paths).items()]
