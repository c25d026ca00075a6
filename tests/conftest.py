"""Tiers of tests, their time limits, skips that are not allowed, and fixtures of several folders.

A test without a marker is in the fast tier; ``slow`` and ``grid`` are the others (README.md).
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jobs import Job
from served import RUN

# No pool of compilers in every process of every test.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

SECONDS = {"grid": 7200, "slow": 1200}  # the fast tier's limit is in pyproject.toml

_skipped: list[tuple[str, str]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Before there are workers of pytest-xdist: name the run, and import mmengine once.

    Servers (``served.py``) are shared by the workers of a run, and end with its main process.
    yapf, which mmengine imports, writes a cache at its first import on a machine, not atomically:
    another process then reads half a file.
    """
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = str(os.getpid())
        importlib.import_module("mmengine.config")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each tier has its time limit; a case of the grid is that, also where its test is slow.

    What is serial is slow, so that the fast tier is one parallel run.
    """
    for item in items:
        tier = next((tier for tier in SECONDS if item.get_closest_marker(tier)), None)
        if tier and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS[tier]))
        if item.get_closest_marker("serial") and not tier:
            raise pytest.UsageError(f"{item.nodeid} is serial and not slow; make test skips it")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, (tuple, list)) else str(longrepr)
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ALLOWED_SKIPS=file, fail on a skip whose reason is not a line of that file."""
    listed = os.environ.get("ALLOWED_SKIPS")
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    if listed is None or is_worker:
        return
    allowed = {line.strip() for line in Path(listed).read_text().splitlines()}
    refused = [f"{test}: {reason}" for test, reason in _skipped if reason not in allowed]
    if refused:
        print("\nskipped for a reason that is not in", listed, *refused, sep="\n  ")
        session.exitstatus = 1


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sampling config and weights drawn at random; tests only read it."""
    from runs import write_random_model

    return write_random_model(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test, none of which outlives it."""
    started: list[Job] = []
    yield started
    for job in started:
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)
        job.process.wait(10)
