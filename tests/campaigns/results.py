"""Results of campaigns: a line of JSON for each test, and a summary."""

from __future__ import annotations

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


@cache
def commit() -> str:
    """The commit of the working tree, marked where it has been changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


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
    campaigns = defaultdict(list)
    for line in lines:
        campaigns[name_of(line["test"])].append(line)

    rows = []
    for name, results in sorted(campaigns.items()):
        held = [line for line in results if line["outcome"] == "passed"]
        failed = [line for line in results if line["outcome"] != "passed"]
        figures = defaultdict(list)
        for line in held:
            for key, value in line["figures"].items():
                figures[key].append(value)

        rows.append(
            {
                "campaign": name,
                "bar": results[0]["bar"],
                "size": results[0]["size"],
                "held": sum(line["trials"] for line in held),
                "failed": sum(line["trials"] for line in failed),
                "controls noticed": sum(not line["trials"] for line in held),
                "controls missed": sum(not line["trials"] for line in failed),
                "seconds": round(sum(line["seconds"] for line in results)),
                "commits": sorted({line["commit"] for line in results}),
                "seeds": sorted({line["seed"] for line in results}),
                "figures": {key: range_of(values) for key, values in figures.items()},
            }
        )
    return rows


def range_of(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def write_summary(folder: Path) -> None:
    """``summary.json``; messages of failures are in ``results.jsonl``."""
    lines = read(folder)
    if lines:
        (folder / "summary.json").write_text(json.dumps(summarize(lines), indent=2) + "\n")
