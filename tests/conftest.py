"""Shared fixtures; a session in which a test was skipped for a reason that is not allowed can be made to fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# No pool of compilers in every process of every test.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

_skipped: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ALLOWED_SKIPS=file, fail on a skip whose reason is not a line of that file."""
    listed = os.environ.get("ALLOWED_SKIPS")
    if listed is None:
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
