"""The page, in Gradio: its tab Sample, with the history of what was sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.processing_utils import save_file_to_cache

from opensora_sp.sampling.outputs import facts_of
from opensora_sp.training.curves import modified

from . import form, views
from .folders import Folders, short_names
from .form import FIELDS
from .history import Result, delete, results, thumbnail
from .jobs import Job, Queue
from .page_runs import QUIET, runs_tab

# Seconds between two looks at jobs, at the history, and at uploads, which are kept for so long.
POLL, REFRESH, KEPT = 0.5, 3.0, (3600, 24 * 3600)
MAX_VIDEOS, MAX_DIGITS = 16, 20
COMPARE = ("Compare with the next", "Compare no longer")
CONFIRM = "(words, path) => [confirm('Delete this video for good?') ? words : null, path]"


def build(folders: Folders, queue: Queue) -> gr.Blocks:
    """The page over these folders and this queue."""
    page = gr.Blocks(title="opensora-sp studio", analytics_enabled=False, delete_cache=KEPT)
    with page:
        gr.Markdown("# opensora-sp studio")
        with gr.Tab("Sample"):
            with gr.Row():
                with gr.Column():
                    fields = _fields(folders, queue, page)
                    count = gr.Slider(1, MAX_VIDEOS, 1, step=1, label="Videos")
                    with gr.Row():
                        buttons = [gr.Button("Sample", variant="primary")]
                        buttons += [gr.Button("Cancel"), gr.Button("Cancel all")]
                with gr.Column():
                    listed = gr.HTML(views.IDLE, elem_id="queue")
                    shown = _history(folders, fields)
            _sampling(queue, page, [count, *fields.values()], buttons, [listed, *shown])
        with gr.Tab("Runs"):
            runs_tab(folders, page)
    return page


def _fields(folders: Folders, queue: Queue, page: gr.Blocks) -> dict[str, Any]:
    """Fields by config key, which show the run's values and the frames that references set."""
    files: dict[str, Any] = dict(file_count="multiple", file_types=["image", "video"], height=150)
    lists: dict[str, Any] = dict(multiselect=True, allow_custom_value=True)
    fields: dict[str, Any] = {"ckpt": _chooser("ckpt", folders.weights(), allow_custom_value=True)}
    for key in ("prompt", "negative_prompt"):
        fields[key] = _text(key)
    with gr.Row():
        for key in list(FIELDS)[3:10]:
            fields[key] = _text(key, min_width=120)
    with gr.Accordion("References and LoRA", open=False):
        fields["reference_path"] = gr.File(label="References", **files)
        fields["mask_strategy"] = gr.Dropdown(
            list(form.PLACES.items()), label=FIELDS["mask_strategy"][0], **lists
        )
        picture = gr.HTML(elem_id="frames")
        fields["lora"] = _chooser("lora", folders.adapters(), **lists)

    def refresh() -> list[Any]:
        found = (folders.weights(), folders.adapters())
        return [gr.Dropdown(choices=_choices(paths)) for paths in found]

    def show_values(checkpoint: str | None) -> list[Any]:
        try:
            work = queue.check({"ckpt": checkpoint, "prompt": "any"})
            values = form.settings_of(facts_of(work.cfg, work.request))
            values |= {"prompt": "", "seed": ""}
        except (ValueError, OSError):  # no checkpoint, or text that is still typed
            values = {}
        return [gr.Textbox(placeholder=values.get(key) or FIELDS[key][1]) for key in texts]

    def draw(*texts: Any) -> str:
        values = form.values_of(texts)
        if not (values["reference_path"] or values["mask_strategy"]):
            return ""
        try:
            work = queue.check(values | {"prompt": "any"})
            return views.frames(form.placed_frames(work))
        except (ValueError, OSError) as error:
            return views.alert(form.worded(error))

    texts = [key for key, field in fields.items() if isinstance(field, gr.Textbox)]
    page.load(refresh, None, [fields["ckpt"], fields["lora"]], **QUIET)
    outputs = [fields[key] for key in texts]
    gr.on([page.load, fields["ckpt"].change], show_values, fields["ckpt"], outputs, **QUIET)
    drawn = [fields[key].change for key in ("mask_strategy", "reference_path", "ckpt")]
    drawn += [fields[key].blur for key in ("num_frames", "resolution", "aspect_ratio")]
    gr.on(drawn, draw, list(fields.values()), picture, **QUIET)
    return fields


def _sampling(
    queue: Queue, page: gr.Blocks, inputs: list[Any], buttons: list[Any], outputs: list[Any]
) -> None:
    """Sample and cancel, each tab its own jobs, which it follows."""
    jobs_of: dict[str | None, list[Job]] = {}
    seen, (start, cancel, cancel_all) = gr.State(("", None)), buttons

    async def sample(request: gr.Request, number: int, *texts: Any) -> list[Any]:
        """For each field, the reason if a request is refused for it."""
        values = form.values_of(texts)
        seed = values["seed"] or str(secrets.randbelow(1 << 31))
        is_number = seed.isdecimal() and len(seed) <= MAX_DIGITS
        seeds = range(int(seed), int(seed) + number) if is_number else [seed]
        jobs = [Job(values | {"seed": str(each)}) for each in seeds]
        # They can be cancelled meanwhile.
        jobs_of.setdefault(request.session_hash, []).extend(jobs)
        for job in jobs:
            await asyncio.to_thread(queue.submit, job)
        refused = ("", "")
        if jobs[0].state == "failed":
            refused = await asyncio.to_thread(form.refusal, values, queue.check)
        return [_marked(refused[1] if key == refused[0] else "", key) for key in FIELDS]

    def follow(before: tuple[str, Path | None], request: gr.Request) -> list[Any]:
        """Updates of what has changed: a video that is shown again would start anew."""
        jobs = jobs_of.get(request.session_hash, [])
        text = views.queue(jobs, queue.ahead_of)
        video = next((job.video for job in reversed(jobs) if job.video), None)
        updates = [gr.skip() if text == before[0] else text, *[gr.skip()] * 3]
        if video is not None and video != before[1]:
            updates[1:] = [str(video), *_shown(queue.folders, [str(video)])]
        return [*updates, (text, video)]

    def cancel_first(request: gr.Request) -> None:
        living = [job for job in jobs_of.get(request.session_hash, []) if not job.has_ended]
        for job in living[:1]:
            job.cancel()

    def cancel_every(request: gr.Request) -> None:
        """Also when the tab is closed: nobody else could cancel them then."""
        for job in jobs_of.get(request.session_hash, []):
            job.cancel()

    events = [start.click, inputs[2].submit]
    gr.on(events, sample, inputs, inputs[1:], trigger_mode="multiple", **QUIET)
    gr.Timer(POLL).tick(follow, seen, [*outputs, seen], **QUIET)
    cancel.click(cancel_first, None, None, queue=False)
    cancel_all.click(cancel_every, None, None, queue=False)
    page.unload(cancel_every)


def _history(folders: Folders, fields: dict[str, Any]) -> list[Any]:
    """Returns the path of the chosen video, what shows it, and its metadata."""
    shown = gr.HTML(elem_id="shown")
    with gr.Row():
        reuse, keep, remove = map(gr.Button, ("Use these settings", COMPARE[0], "Delete"))
    metadata = gr.JSON(label="Metadata", elem_id="metadata", max_height=256)
    words = gr.Textbox("", label="History", placeholder="words of the prompt, the seed, the run")
    looks: dict[str, Any] = dict(columns=3, object_fit="contain", buttons=[], show_label=False)
    gallery = gr.Gallery(elem_id="history", allow_preview=False, interactive=False, **looks)
    # Paths: of the chosen video, and of the one that it is compared with.
    chosen, kept, before = gr.State(None), gr.State(None), gr.State(None)

    def choose(text: str, other: str | None, event: gr.SelectData) -> list[Any]:
        # By its caption: the list may have changed since.
        caption, found = event.value["caption"], results(folders, text)
        path = next((str(each.video) for each in found if each.caption == caption), None)
        return [path, *_shown(folders, [other, path])]

    def hold(path: str | None, other: str | None) -> list[Any]:
        return [None, COMPARE[0]] if other or not path else [path, COMPARE[1]]

    def fill(path: str | None) -> list[Any]:
        if not path:
            return [gr.skip()] * len(FIELDS)
        facts, files = Result.read(folders.checked(path)).facts, fields["reference_path"]
        settings = form.settings_of(facts)
        # Where uploads are: Gradio serves no other files, and removes these.
        paths = map(folders.checked, settings["reference_path"])
        copies = [save_file_to_cache(each, files.GRADIO_CACHE) for each in paths]
        files.temp_files.update(copies)
        return list((settings | {"reference_path": copies or None}).values())

    def drop(text: str | None, path: str | None) -> list[Any]:
        """``text`` is None where the user has thought better of it."""
        if text is None or path is None:
            return [gr.skip()] * 5
        video = folders.checked(path)
        if video in folders.history():
            delete(video)
        return [None, "", None, None, COMPARE[0]]

    def listed(text: str, names: list[str] | None) -> list[Any]:
        """The list, if it has changed: a choice in one that is built anew is lost."""
        found = results(folders, text)
        now = [each.caption for each in found]
        changed = [(thumbnail(each.video, modified(each.video)), each.caption) for each in found]
        return [gr.skip() if now == names else changed, now]

    gallery.select(choose, [words, kept], [chosen, shown, metadata], **QUIET)
    keep.click(hold, [chosen, kept], [kept, keep], **QUIET)
    reuse.click(fill, chosen, list(fields.values()), **QUIET)
    changed = [chosen, shown, metadata, kept, keep]
    remove.click(drop, [words, chosen], changed, js=CONFIRM, **QUIET)
    events = [words.change, gr.Timer(REFRESH).tick]
    gr.on(events, listed, [words, before], [gallery, before], **QUIET)
    return [chosen, shown, metadata]


def _shown(folders: Folders, paths: Sequence[str | None]) -> list[Any]:
    """Videos side by side, and the metadata of the last one."""
    try:
        shown = [Result.read(folders.checked(path)) for path in dict.fromkeys(paths) if path]
        return [views.side_by_side(shown), shown[-1].facts if shown else None]
    except (ValueError, OSError) as error:
        return [views.alert(error), gr.skip()]


def _marked(error: str, key: str) -> Any:
    """A field with an error, or without one; files have no room for it."""
    if key == "reference_path":
        return gr.skip()
    return gr.update(info=error, elem_classes=["refused"] if error else [])


def _text(key: str, **options: Any) -> gr.Textbox:
    label, example = FIELDS[key]
    return gr.Textbox("", label=label, placeholder=example, lines=1, max_lines=1, **options)


def _chooser(key: str, paths: Sequence[Path], **options: Any) -> gr.Dropdown:
    """A list that changes later on, or other text: whoever takes the value checks it."""
    chosen = str(paths[0]) if paths and key == "ckpt" else None
    return gr.Dropdown(_choices(paths), label=FIELDS[key][0], value=chosen, **options)


def _choices(paths: Sequence[Path]) -> list[tuple[str, str]]:
    return [(name, str(path)) for path, name in short_names(paths).items()]
