"""Published bugs of context parallelism are named where they are; their right twins are not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from checker.fixtures.common import Expected

import opensora_sp.checker
from opensora_sp.checker import check_parallel

FOLDER = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")
PACKAGE = Path(opensora_sp.checker.__file__).parent


def fixture(name: str) -> ModuleType:
    return import_module(f"checker.fixtures.{name}")


Case = tuple[str, str]
CASES: list[Case] = [(name, bug) for name in NAMES for bug in fixture(name).BUGS]


def bug_of(name: str, bug: str) -> Expected:
    return fixture(name).BUGS[bug]


HANGING = [case for case in CASES if bug_of(*case).findings == ("waiting",)]
OTHERS = [case for case in CASES if case not in HANGING]


@pytest.mark.parametrize(("name", "bug"), OTHERS)
def test_names_a_published_bug_where_it_is(name: str, bug: str) -> None:
    expected = bug_of(name, bug)
    report = check_parallel(fixture(name).make(bug), ranks=expected.ranks)

    assert not report.ok, report
    assert report.first_module == expected.first, report
    flagged = {name: report.gradients.get(name) for name in expected.gradients}
    assert flagged == expected.gradients, report
    assert not [name for name in report.gradients if name.startswith(expected.right)], report
    assert {finding.kind for finding in report.findings} == set(expected.findings), report


@pytest.mark.parametrize(("name", "bug"), HANGING)
def test_names_where_ranks_wait(name: str, bug: str) -> None:
    report = check_parallel(fixture(name).make(bug), seconds=6)

    waiting = [finding for finding in report.findings if finding.kind == "waiting"]
    assert not report.ok
    assert "blocks.0.cross.core" in {finding.module for finding in waiting}, report


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, "float64"),
        pytest.param(3, "float64", marks=pytest.mark.slow),
        pytest.param(4, "float64", marks=pytest.mark.slow),
        pytest.param(3, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_flags_nothing_of_a_right_twin(ranks: int, dtype: str) -> None:
    """Lengths of 7, 5 and 1 tokens, and 3 heads, divide by no number of ranks."""
    # At more ranks than 3 only the fixture that needs them. Bugs may share their twin.
    cases = [case for case in CASES if ranks <= 3 or bug_of(*case).ranks == ranks]
    twins = {fixture(name).make(bug, False) for name, bug in cases}
    reports = {twin: check_parallel(twin, ranks=ranks, dtype=dtype) for twin in twins}
    wrongly_flagged = {
        twin: report for twin, report in reports.items() if not report.ok or report.compared < 0.9
    }
    assert not wrongly_flagged


def test_the_checker_knows_no_fixture() -> None:
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        assert not [word for word in (*NAMES, "fixtures") if word in source], path
