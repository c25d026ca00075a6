"""The driver of the campaigns, with a toy campaign, and what every campaign must have."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from campaigns.case import Case
from campaigns.conftest import CASES

TESTS = Path(__file__).parents[1]
CAMPAIGNS = sorted(path.stem for path in (TESTS / "campaigns").glob("test_*.py"))
TOY = """
from pathlib import Path
import pytest
from campaigns.case import Case, with_sample

pytestmark = pytest.mark.campaign(bar="is even", size=4)

def cases(random):
    numbers = [0, 1, *random.sample(range(100, 10_000, 2), 3)]
    return with_sample([Case(f"number {n}", n, trials=2) for n in numbers], ["number 0"])

def test_it_is_even(case, record_property):
    record_property("size", case.arguments)
    is_mended = Path("mended").exists()
    assert case.arguments % 2 == 0 or is_mended, "an odd number"

def test_control_an_odd_number():
    with pytest.raises(AssertionError):
        assert 3 % 2 == 0
"""
SETTINGS = "[pytest]\nmarkers =\n  campaign\n  slow\n  grid\n"


def run_toy(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """The toy campaign in a process of its own, with results in ``folder / "results"``."""
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_toy.py").write_text(TOY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "campaigns.conftest",
        "-p",
        "no:cacheprovider",
    ]
    paths = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, "--campaign-results", "results", *options],
        cwd=folder,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "results/results.jsonl").read_text().splitlines()
    ]


def cases_run(folder: Path) -> list[str]:
    return [line["test"].partition("[")[2].rstrip("]") for line in lines_of(folder)]


def test_what_failed_is_run_again_and_what_passed_is_not(tmp_path: Path) -> None:
    first = run_toy(tmp_path)
    assert first.returncode == pytest.ExitCode.TESTS_FAILED, first.stdout + first.stderr
    (summary,) = json.loads((tmp_path / "results/summary.json").read_text())
    counts = {name: summary[name] for name in ("held", "failed", "controls noticed")}
    assert counts == {"held": 8, "failed": 2, "controls noticed": 1}
    assert summary["figures"]["size"]["least"] == 0
    assert any("an odd number" in line["message"] for line in lines_of(tmp_path))

    (tmp_path / "mended").touch()
    drawn = cases_run(tmp_path)
    assert run_toy(tmp_path).returncode == pytest.ExitCode.OK
    assert cases_run(tmp_path) == [*drawn, "number 1"]
    (summary,) = json.loads((tmp_path / "results/summary.json").read_text())
    assert (summary["held"], summary["failed"]) == (10, 0)
    # Nothing is left to run.
    assert run_toy(tmp_path).returncode == pytest.ExitCode.OK

    # Another seed draws other cases. CI runs the sample and the control.
    assert run_toy(tmp_path, "--campaign-seed", "1", "-m", "slow and not grid").returncode == 0
    assert cases_run(tmp_path)[-2:] == ["number 0", ""]
    listed = run_toy(tmp_path, "--campaign-seed", "1", "--collect-only").stdout
    others = [name for name in drawn if name and name not in ("number 0", "number 1")]
    assert len(others) == 3 and not any(f"[{name}]" in listed for name in others)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def drawn(module: ModuleType, seed: int) -> Iterable[Case]:
    for function in CASES.values():
        if hasattr(module, function):
            yield from getattr(module, function)(Random(seed))


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_every_campaign_has_its_size_a_sample_and_controls(name: str) -> None:
    module = load(name)
    marks = module.pytestmark if isinstance(module.pytestmark, list) else [module.pytestmark]
    (mark,) = [mark.kwargs for mark in marks if mark.name == "campaign"]
    cases = list(drawn(module, seed=0))
    assert sum(case.trials for case in cases) >= mark["size"] and mark["bar"]
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.in_sample for case in cases)
    assert any(name.startswith("test_control") for name in dir(module))

    again = list(drawn(module, seed=0))
    assert [case.name for case in again] == [case.name for case in cases]
