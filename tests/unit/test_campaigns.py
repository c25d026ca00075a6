"""What every campaign must have."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from campaigns.case import Case
from campaigns.conftest import CASES

TESTS = Path(__file__).parents[1]
CAMPAIGNS = sorted(path.stem for path in (TESTS / "campaigns").glob("test_*.py"))


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
