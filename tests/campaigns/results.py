"""Results of campaigns: a line of JSON for each test, a summary, and a page."""

from __future__ import annotations

import html
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTERNAL = ("campaign", "trials")  # properties that the driver adds
STYLE = """
body { font: 15px sans-serif; margin: 2em }
td, th { padding: .3em .8em; text-align: left }
pre { white-space: pre-wrap }
"""


@cache
def commit() -> str:
    """The commit of the working tree, marked where it has been changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def read(folder: Path) -> list[dict[str, Any]]:
    """The newest result of each test."""
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    newest = {line["test"]: line for line in map(json.loads, lines)}
    return list(newest.values())


def passed(folder: Path, seed: int) -> set[str]:
    """The tests that have passed with this seed at this commit."""
    return {
        line["test"]
        for line in read(folder)
        if line["outcome"] == "passed" and (line["seed"], line["commit"]) == (seed, commit())
    }


def append(folder: Path, seed: int, report: pytest.TestReport) -> None:
    """Write one result."""
    properties = dict(report.user_properties)
    if "campaign" not in properties:
        return
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "commit": commit(),
        "seed": seed,
        **properties["campaign"],
        "trials": properties["trials"],
        "figures": {name: value for name, value in properties.items() if name not in INTERNAL},
        "message": "" if report.passed else report.longreprtext,
    }
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def name_of(test: str) -> str:
    """``tests/campaigns/test_exact_resume.py::test_x[y]`` belongs to ``exact resume``."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_").replace("_", " ")


def summarize(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each campaign: trials that held and failed, controls, time, and the range of figures."""
    of_campaign = defaultdict(list)
    for line in lines:
        of_campaign[name_of(line["test"])].append(line)

    rows = []
    for name, found in sorted(of_campaign.items()):
        held = [line for line in found if line["outcome"] == "passed"]
        failed = [line for line in found if line["outcome"] != "passed"]
        figures = defaultdict(list)
        for line in held:
            for key, value in line["figures"].items():
                figures[key].append(value)

        rows.append(
            {
                "campaign": name,
                "bar": found[0]["bar"],
                "size": found[0]["size"],
                "held": sum(line["trials"] for line in held),
                "failed": sum(line["trials"] for line in failed),
                "controls noticed": sum(not line["trials"] for line in held),
                "controls missed": sum(not line["trials"] for line in failed),
                "seconds": round(sum(line["seconds"] for line in found)),
                "commits": sorted({line["commit"] for line in found}),
                "seeds": sorted({line["seed"] for line in found}),
                "figures": {key: range_of(values) for key, values in figures.items()},
            }
        )
    return rows


def range_of(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def write_page(folder: Path) -> None:
    """``summary.json``, and ``index.html`` with a table and every failure."""
    lines = read(folder)
    if not lines:
        return
    rows = summarize(lines)
    (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")

    columns = ["campaign", "bar", "size", "held", "failed", "controls noticed"]
    columns += ["controls missed", "seconds", "figures", "commits", "seeds"]
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = [
        "<tr>" + "".join(f"<td>{html.escape(text_of(row[c]))}</td>" for c in columns) + "</tr>"
        for row in rows
    ]
    failures = [
        f"<h3>{html.escape(line['test'])}</h3><pre>{html.escape(line['message'])}</pre>"
        for line in lines
        if line["outcome"] != "passed"
    ]
    (folder / "index.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>Campaigns</title><style>{STYLE}</style>"
        f"<h1>Campaigns</h1><table><tr>{head}</tr>{''.join(body)}</table>"
        f"<h2>Failures: {len(failures)}</h2>{''.join(failures)}\n"
    )


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        ranges = (
            f"{k}: {v['least']:g} / {v['median']:g} / {v['most']:g}" for k, v in value.items()
        )
        return "; ".join(ranges)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
