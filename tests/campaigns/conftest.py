"""The driver of the campaigns, which draws their cases.

A campaign is a file here. Its ``pytestmark`` has ``campaign(bar=..., size=...)``, its function
``cases(random)`` draws the cases, and its test takes a ``case``. A second test may take a
``training_case``, drawn by ``training_cases(random)``. CI runs a sample of the cases; ``make
campaigns`` runs all.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

# What tests take, and the function that draws it.
CASES = {"case": "cases", "training_case": "training_cases"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign-seed", type=int, default=0, help="draws the cases of campaigns")


def is_named(config: pytest.Config) -> bool:
    """Whether files are named on the command line; where all tests run, samples are enough."""
    return config.args != config.getini("testpaths")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in set(metafunc.fixturenames) & CASES.keys():
        seed = metafunc.config.getoption("--campaign-seed", 0)
        # A text seeds alike in every process.
        random = Random(f"{seed} {metafunc.module.__name__}")
        parameters = [
            pytest.param(case, id=case.name, marks=[] if case.in_sample else pytest.mark.grid)
            for case in getattr(metafunc.module, CASES[fixture])(random)
            if case.in_sample or is_named(metafunc.config)
        ]
        metafunc.parametrize(fixture, parameters)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases outside of the sample are of the grid, all others slow."""
    for item in items:
        is_of_campaign = item.get_closest_marker("campaign") is not None
        if is_of_campaign and item.get_closest_marker("grid") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a training on eight clips; some campaigns have another."""
    # Tests of the drawn cases alone need no helpers.
    from runs import write_training

    return write_training(tmp_path_factory.mktemp("set"), 8)
