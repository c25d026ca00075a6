"""The roofline: floors below predictions, and the documentation's table is the benchmark's."""

from __future__ import annotations

import pytest
from runs import ROOT

from benchmarks import roofline
from benchmarks.roofline import SHAPES, Shape
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.planner.operators import PRODUCTS, SPATIAL, Work
from opensora_sp.planner.step_time import EXCHANGES, OPTIMIZER, ZERO

SMALL = Shape("small", 8, 64, 1)


def test_latents_have_the_patches_of_a_shape() -> None:
    for shape in (*SHAPES, SMALL):
        batch, _, frames, height, width = shape.latents
        assert (batch, frames) == (shape.batch, shape.frames)
        assert height * width == 4 * shape.patches


def test_floors_take_the_longer_of_computing_and_moving() -> None:
    compute = Work(flops=GPUS["H200"].peak, bytes=4.8e12 / 2, operators=1)
    assert roofline.floor_of(PRODUCTS, compute, "H200") == 1
    assert roofline.floor_of(PRODUCTS, Work(flops=1, bytes=2 * 3.35e12), "H100") == 2
    assert roofline.floor_of(EXCHANGES, Work(bytes=450e9), "H200") == 1


def test_floors_are_below_predictions() -> None:
    step = roofline.step_of("H200", SMALL, 8)
    regions = {row.region: row for row in step.rows}
    assert {PRODUCTS, SPATIAL, EXCHANGES, OPTIMIZER, ZERO} <= regions.keys()
    assert all(0 < row.floor < row.seconds for row in step.rows)
    assert 0 < step.floor < step.seconds and 0 < step.mfu < 1

    # So few tokens take less time than the host needs to launch their operators.
    assert "| launches |" in roofline.steps_table([step])
    assert roofline.regions_table([step]).count("| small | 8 |") == len(step.rows)


@pytest.mark.slow
def test_the_documented_table_is_the_predicted_one(tmp_path) -> None:
    steps = [step for gpu in GPUS for step in roofline.steps_on(gpu)]
    expected = f"{roofline.steps_table(steps)}\n\n{roofline.regions_table(steps)}\n"
    page = (ROOT / "docs/benchmarks.md").read_text()
    _, _, rest = page.partition("<!-- roofline: python -m benchmarks roofline -->\n")
    documented, _, _ = rest.partition("<!-- end of roofline -->")
    assert documented == expected, "run python -m benchmarks roofline and copy its tables"

    roofline.plot(steps[: len(SHAPES) * 2], tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
