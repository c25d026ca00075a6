"""The page's tab Runs: curves, state, config and videos of trainings, while they train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
from gradio.components.plot import PlotData

from opensora_sp.training.curves import BY_TIMESTEP, CURVES, Status, changes, config_of, traces

from . import views
from .folders import Folders, short_names

REFRESH = 3.0  # seconds
NUMBERS = {"loss": "loss", "tokens/s": "tokens_per_s", "GB": "peak_memory_gb", "s left": "eta"}
QUIET: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
GRID, CLEAR = "rgba(128, 128, 128, 0.3)", "rgba(0, 0, 0, 0)"


def runs_tab(folders: Folders, page: gr.Blocks) -> None:
    """Fill the tab."""
    _, choices, rows = _listed(folders)
    newest = [path for _, path in choices[:1]]
    runs = gr.Dropdown(choices, value=newest, label="Runs in the plots", multiselect=True)
    looks: dict[str, Any] = dict(interactive=False, show_search="search", max_height=240)
    table = gr.Dataframe(rows, label="All runs", elem_id="runs", buttons=[], **looks)
    with gr.Row():
        smoothing = gr.Slider(0, 0.99, 0.6, step=0.01, label="Smoothing")
        scale = gr.Radio(["linear", "log"], value="linear", label="Vertical axis")
    with gr.Row():
        plots = [gr.Plot(label=title, min_width=400) for title in CURVES]
    with gr.Accordion("Config, or how the configs of the chosen runs differ", open=False):
        config = gr.HTML(elem_id="config")
    videos, before = gr.HTML(elem_id="videos"), gr.State(None)

    def show(seen: Any, chosen: list[str] | None, *options: Any) -> list[Any]:
        """All but what is chosen; the browser draws what has changed."""
        names, choices, rows = _listed(folders)
        # Others were removed meanwhile.
        drawn = {names[run]: run for run in map(Path, chosen or ()) if run in names}
        configs = differences({name: config_of(run) for name, run in drawn.items()})
        now = (changes(list(drawn.values())), chosen, options)
        figures = [gr.skip()] * len(CURVES)
        if now != seen:
            figures = [_plot(title, drawn, *options) for title in CURVES]
        return [now, gr.Dropdown(choices=choices), rows, configs, views.videos(drawn), *figures]

    inputs: list[Any] = [runs, smoothing, scale]
    events = [page.load, gr.Timer(REFRESH).tick, *(each.change for each in inputs)]
    outputs = [before, runs, table, config, videos, *plots]
    # Without a check that chosen runs are in the list: one may have been removed since.
    gr.on(events, show, [before, *inputs], outputs, preprocess=False, **QUIET)


def _listed(folders: Folders) -> tuple[dict[Path, str], list[Any], pd.DataFrame]:
    """Names of the runs, choices among them, and a table of their states and newest numbers."""
    states = {run: Status.read(run) for run in folders.trained()}
    names = short_names(sorted(states, key=lambda run: states[run].began, reverse=True))
    choices, rows = [], []
    for run, name in names.items():
        status = states[run]
        choices.append((f"{name} ({status.state})", str(run)))
        row = dict(run=name, state=status.state, step=status.last.get("step", 0), of=status.stop)
        row |= {title: status.last.get(key) for title, key in NUMBERS.items()}
        rows.append(row | dict(started=status.began, path=str(run)))
    return names, choices, pd.DataFrame(rows).round(4)


def _plot(title: str, runs: dict[str, Path], smoothing: float, scale: str) -> gr.Plot:
    """A plot in the colors of the page: ``studio.css`` has the one of its texts."""
    drawn = traces(title, runs, smoothing=smoothing)
    axis = dict(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    unit = "timestep, from data to noise" if title == BY_TIMESTEP else "step"
    layout: dict[str, Any] = dict(height=280, margin=dict(l=40, r=10, t=50, b=40))
    layout |= dict(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, legend=dict(orientation="h", y=1))
    layout |= dict(xaxis=axis | dict(title=dict(text=unit)), yaxis=axis | dict(type=scale))
    # ``studio.js`` keeps what the user has zoomed into, for all plots of a unit.
    figure = dict(data=drawn, layout=layout | dict(meta=unit), config=dict(displaylogo=False))
    return gr.Plot(PlotData(type="plotly", plot=json.dumps(figure)), visible=bool(drawn))


def differences(settings: Mapping[str, dict[str, Any]]) -> str:
    """A table of the settings that differ between several configs, or of all of one."""
    if not settings:
        return ""
    table = pd.json_normalize(list(settings.values())).T.astype(str)
    table.columns = list(settings)
    is_shown = table.nunique(axis=1) > (len(settings) > 1)
    with pd.option_context("display.max_colwidth", None):
        shown = table[is_shown].to_html(border=0, na_rep="")
    return f"<div class='wide'>{shown}</div><p>{sum(~is_shown)} settings are equal.</p>"
