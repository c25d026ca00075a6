"""What every campaign must have."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from campaigns.case import Case
from campaigns.conftest import CASES
from campaigns.test_kill import CALLS, OF_RANK_0
from campaigns.test_storage_faults import BEGIN, END
from planted_faults import MOMENTS

CAMPAIGNS = sorted(path.stem for path in Path(__file__).parents[1].glob("campaigns/test_*.py"))


def drawn(module: ModuleType, seed: int) -> Iterable[Case]:
    for function in CASES.values():
        if hasattr(module, function):
            yield from getattr(module, function)(Random(seed))


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_every_campaign_has_its_size_and_a_sample(name: str) -> None:
    module = importlib.import_module(f"campaigns.{name}")
    marks = module.pytestmark if isinstance(module.pytestmark, list) else [module.pytestmark]
    (mark,) = [mark.kwargs for mark in marks if mark.name == "campaign"]
    cases = list(drawn(module, seed=0))
    assert sum(case.trials for case in cases) >= mark["size"] and mark["bar"]
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.in_sample for case in cases)
    assert [case.name for case in drawn(module, seed=0)] == [case.name for case in cases]


def test_every_call_exists_in_which_a_fault_is_planted() -> None:
    of_storage = [what for what in chain(*BEGIN.values(), END.values()) if ":" in what]
    for what in {*MOMENTS.values(), *chain(*CALLS.values(), *OF_RANK_0.values()), *of_storage}:
        assert callable(pkgutil.resolve_name(what))
