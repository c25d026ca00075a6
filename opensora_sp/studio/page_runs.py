"""The page's tab Runs: curves, state, config and videos of trainings, while they train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from opensora_sp.training.curves import BY_TIMESTEP, CURVES, Status, changes, config_of, plot

from . import views
from .folders import Folders, short_names

REFRESH = 3.0  # seconds
NUMBERS = {"loss": "loss", "tokens/s": "tokens_per_s", "GB": "peak_memory_gb", "s left": "eta"}
ORDERS = ("newest", "name", "state", "loss")
QUIET: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
COLUMNS = ["run", "x", "value", "log10", "measured"]


def runs_tab(folders: Folders, page: gr.Blocks) -> None:
    """Fill the tab."""
    with gr.Row():
        words = gr.Textbox("", label="Filter", placeholder="words of the path or the state")
        order = gr.Dropdown(ORDERS, value="newest", label="Sort by")
    choices = _choices(folders, "", "newest", [])
    runs = gr.CheckboxGroup(choices, value=[path for _, path in choices[:1]], label="Runs")
    summary = gr.HTML(elem_id="summary")
    with gr.Row():
        smoothing = gr.Slider(0, 0.99, 0.6, step=0.01, label="Smoothing")
        scale = gr.Radio(["linear", "log"], value="linear", label="Vertical axis")
        first, last = (gr.Number(0, label=text) for text in ("First step", "Last step, 0 for all"))
    with gr.Row():
        looks: dict[str, Any] = dict(x="x", y="value", color="run", color_title=" ", height=280)
        looks |= dict(tooltip=["measured"], min_width=400, buttons=["fullscreen", "export"])
        units = {BY_TIMESTEP: "timestep, from data to noise"}
        plots = [gr.LinePlot(title=t, x_title=units.get(t, "step"), **looks) for t in CURVES]
    with gr.Accordion("Config, or how the configs of the chosen runs differ", open=False):
        config = gr.HTML(elem_id="config")
    videos, before = gr.HTML(elem_id="videos"), gr.State({})

    def show(
        seen: dict[str, Any], chosen: list[str], text: str, by: str, *options: Any
    ) -> list[Any]:
        """Updates of what has changed; never of what is ticked."""
        paths = [folders.checked(run) for run in chosen or ()]
        known = short_names(folders.trained())
        names = {known[path]: path for path in paths if path in known}  # others were removed
        now: dict[str, Any] = {
            "choices": _choices(folders, text, by, chosen),
            "summary": _summary(names),
            "config": _differences({name: config_of(run) for name, run in names.items()}),
            "videos": views.videos(names),
            "plots": (changes(paths), chosen, options),
        }
        is_new = {key: now[key] != seen.get(key) for key in now}
        texts = ("summary", "config", "videos")
        updates = [now[key] if is_new[key] else gr.skip() for key in texts]
        group = gr.CheckboxGroup(choices=now["choices"]) if is_new["choices"] else gr.skip()
        drawn = [gr.skip()] * len(CURVES)
        # Again a little later: with colors or legend the browser draws the points from before.
        now["again"] = 2 if is_new["plots"] else max(0, seen.get("again", 0) - 1)
        if is_new["plots"] or seen.get("again"):
            drawn = [_plot(title, names, *options) for title in CURVES]
        return [now, group, *updates, *drawn]

    inputs: list[Any] = [runs, words, order, smoothing, scale, first, last]
    events = [each.change for each in inputs]
    outputs = [before, runs, summary, config, videos, *plots]
    # Without a check that chosen runs are in the list: one may have been removed since.
    updating: Any = (show, [before, *inputs], outputs)
    gr.on([page.load, gr.Timer(REFRESH).tick], *updating, preprocess=False, **QUIET)
    changed = gr.on(events, *updating, preprocess=False, **QUIET)
    changed.then(*updating, preprocess=False, **QUIET)

    def zoom(event: gr.SelectData) -> list[float]:
        return [round(step) for step in event.index]

    for title, lines in zip(CURVES, plots, strict=True):
        if title != BY_TIMESTEP:
            lines.select(zoom, None, [first, last], **QUIET)
            lines.double_click(lambda: (0, 0), None, [first, last], **QUIET)


def _plot(
    title: str, runs: dict[str, Path], smoothing: float, scale: str, first: float, last: float
) -> gr.LinePlot:
    drawn = plot(title, runs, smoothing=smoothing)
    rows = pd.DataFrame(drawn.rows, columns=COLUMNS)
    return gr.LinePlot(
        value=rows if drawn.rows else None,
        y="log10" if scale == "log" else "value",
        color_map=drawn.colors,
        colors_in_legend=drawn.legend,
        x_lim=None if title == BY_TIMESTEP or first >= last else [first, last],
        visible=bool(drawn.rows),
    )


def _choices(folders: Folders, words: str, by: str, chosen: list[str]) -> list[tuple[str, str]]:
    """The runs that have all words, and the chosen ones, with their state."""
    runs = {run: Status.read(run) for run in folders.trained()}
    names = short_names(list(runs))
    keys: dict[str, Any] = {
        "newest": lambda run: runs[run].began,
        "name": names.get,
        "state": lambda run: runs[run].state,
        "loss": lambda run: runs[run].last.get("loss") or float("inf"),
    }
    shown = {}
    for run in sorted(runs, key=keys[by], reverse=by == "newest"):
        text = f"{run} {runs[run].state}".lower()
        is_found = all(word in text for word in words.lower().split())
        if is_found or str(run) in chosen:
            shown[str(run)] = f"{names[run]} ({runs[run].state})"
    return [(name, path) for path, name in shown.items()]


def _summary(runs: Mapping[str, Path]) -> str:
    """A table of states and newest numbers."""
    rows = []
    for name, run in runs.items():
        status = Status.read(run)
        numbers = {name: status.last.get(key) for name, key in NUMBERS.items()}
        step = f"{status.last.get('step', 0)} of {status.stop}"
        rows.append(dict(run=name, state=status.state, step=step, started=status.began) | numbers)
    return _table(pd.DataFrame(rows), index=False) if rows else "<p>Choose runs.</p>"


def _differences(configs: Mapping[str, dict[str, Any]]) -> str:
    """A table of the settings that differ between several configs, or of all of one."""
    if not configs:
        return ""
    settings = pd.json_normalize(list(configs.values())).T.astype(str)
    settings.columns = list(configs)
    is_shown = settings.nunique(axis=1) > (len(configs) > 1)
    return _table(settings[is_shown]) + f"<p>{sum(~is_shown)} settings are equal.</p>"


def _table(frame: Any, **options: Any) -> str:
    options |= dict(border=0, na_rep="", float_format="{:.4g}".format)
    with pd.option_context("display.max_colwidth", None):
        return f"<div class='wide'>{frame.to_html(**options)}</div>"
