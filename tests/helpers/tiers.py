"""Tests that check a sample of their cases in CI and all of them on demand (marker ``grid``)."""

import pytest

sample_or_grid = pytest.mark.parametrize(
    "grid",
    [pytest.param(False, id="sample"), pytest.param(True, id="grid", marks=pytest.mark.grid)],
)
