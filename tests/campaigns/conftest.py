"""The driver of the campaigns: draws their cases, resumes them, and writes a summary of results.

A campaign is a file here. Its ``pytestmark`` has ``campaign(bar=..., size=...)``, its function
``cases(random)`` draws the cases, and its test takes a ``case``. A second test may take a
``training_case``, drawn by ``training_cases(random)``. Its controls, ``test_control_...``, plant
what the campaign has to notice. ``record_property`` notes figures.

CI runs the controls and a sample of the cases; ``make campaigns`` runs all, and resumes if it is
interrupted: what has passed at the same commit and seed is not run again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from campaigns import results
from campaigns.case import Case

# What tests take, and the function that draws it.
CASES = {"case": "cases", "training_case": "training_cases"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("campaigns")
    group.addoption("--campaign-seed", type=int, default=0, help="draws the cases of campaigns")
    group.addoption(
        "--campaign-results",
        type=Path,
        help="folder of results: run what has not passed there yet, and write the summary",
    )


def is_named(config: pytest.Config) -> bool:
    """Whether files are named on the command line; where all tests run, samples are enough."""
    return config.args != config.getini("testpaths")


def seed_of(config: pytest.Config) -> int:
    return config.getoption("--campaign-seed", 0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in set(metafunc.fixturenames) & CASES.keys():
        # A text seeds alike in every process.
        random = Random(f"{seed_of(metafunc.config)} {metafunc.module.__name__}")
        parameters = [
            pytest.param(case, id=case.name, marks=[] if case.in_sample else pytest.mark.grid)
            for case in getattr(metafunc.module, CASES[fixture])(random)
            if case.in_sample or is_named(metafunc.config)
        ]
        metafunc.parametrize(fixture, parameters)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases outside of the sample are of the grid, all others slow; those that passed are out."""
    folder = config.getoption("--campaign-results", None)
    passed = results.passed(folder, seed_of(config)) if folder else set()
    remaining, left_out = [], []

    for item in items:
        mark = item.get_closest_marker("campaign")
        if mark is None:
            remaining.append(item)
            continue
        if item.get_closest_marker("grid") is None:
            item.add_marker(pytest.mark.slow)
        item.user_properties += [("campaign", mark.kwargs), ("trials", trials_of(item))]
        (left_out if item.nodeid in passed else remaining).append(item)

    items[:] = remaining
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a training on eight clips; some campaigns have another."""
    # The driver itself needs no helpers: its own tests load it without them.
    from runs import write_training

    return write_training(tmp_path_factory.mktemp("set"), 8)


def trials_of(item: Any) -> int:
    """How many faults a test tries; 0 for a control."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params.values() if callspec else []
    return sum(value.trials for value in parameters if isinstance(value, Case))


class Recorder:
    """Writes each result as soon as it is known, and the summary at the end."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        failed_around = report.when != "call" and report.failed
        if report.when == "call" or failed_around or report.skipped:
            results.append(self.folder, self.seed, report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """All tests have passed already: that is no failure."""
        results.write_summary(self.folder)
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and results.passed(
            self.folder, self.seed
        ):
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--campaign-results", None)
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist, which reports to the main process
    if folder and not is_worker:
        config.pluginmanager.register(Recorder(folder, seed_of(config)), "campaign results")
