"""``backward(retain_graph=True)`` and a second ``backward()``, with SP and checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import PLAIN, Case, make_inputs, make_model
from ranks import run_ranks

from opensora_sp.parallel import SequenceMesh, parallelize

pytestmark = pytest.mark.core
REFUSED = r"got a second backward pass \(retain_graph=True\).*set recompute_communication=True"
IMAGE = Case((1, 1, 4, 3))  # heads are exchanged inside of blocks
OPTIONS: list[dict[str, Any]] = [  # under which blocks keep nothing that they receive
    {},
    dict(overlap_chunks=2),
    dict(overlap_backward=True),
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]


def gradients(
    case: Case, mesh: SequenceMesh, options: dict[str, Any], passes: int
) -> dict[str, torch.Tensor]:
    model, inputs = parallelize(make_model(case), mesh, **options), make_inputs(case)
    model.set_grad_checkpoint(True)
    loss = model(**inputs).square().sum()
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad} | {
        "x": inputs["x"].grad
    }


def twice() -> int:
    mesh, refused = SequenceMesh(dist.get_world_size()), 0
    cases = [(PLAIN[0], options, False) for options in OPTIONS]
    cases += [(IMAGE, {}, True), (IMAGE, dict(recompute_communication=True), False)]
    for case, options, keeps in cases:
        once = gradients(case, mesh, options, 1)
        if keeps:
            with pytest.raises(ValueError, match=REFUSED):
                gradients(case, mesh, options, 2)
            refused += 1
            continue
        for name, gradient in gradients(case, mesh, options, 2).items():
            torch.testing.assert_close(
                gradient, 2 * once[name], rtol=1e-9, atol=1e-12, msg=f"{name}, {options}"
            )

    return refused


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_second_backward_adds_the_same_gradient_or_is_refused(world: int) -> None:
    assert run_ranks(world, twice) == [1] * world
