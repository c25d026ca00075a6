"""Compiled blocks of every model on CUDA's code path: Triton's kernels, and fewer launches."""

import pytest
from cuda_cases import batch, build, cache, launched, on_model, step
from cuda_stub import requires_stub, run_on_stub

pytestmark = requires_stub

# Kernels and products of a forward and a backward pass at depth 2, as measured. Each of these takes
# up to a minute to compile with a cold cache; STDiT3 without masks is in test_cuda_attention.py.
# Of a part's modulation each branch is an input of its own, whose gradients are added by a launch:
# 2 or 3 more for a block than with all branches in one, which eager mode pays with 10.
LAUNCHES = {"STDiT": (95, 207), "STDiT2": (204, 277), "STDiT3 x_mask": (185, 319)}


def on_compiled(case):
    from opensora_sp.models import compile_blocks

    model = build(case)
    compile_blocks(model)
    inputs = batch(case, model)
    step(model, inputs, "first ")
    step(model, inputs, "")


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiled_forward_and_backward(case):
    eager = run_on_stub(on_model, case, False)
    compiled = run_on_stub(on_compiled, case, timeout=400, env=cache())
    assert not compiled.refused

    for name, bound in zip(("forward", "backward"), LAUNCHES[case], strict=True):
        part = compiled.in_phase(name)
        assert launched(part) <= bound, launched(part)
        assert launched(part) < launched(eager.in_phase(name))
        assert not part.syncs, part.syncs

        kernels = part.kernels()
        assert kernels["triton_"] > 0
        assert any("pytorch_flash::flash" in kernel for kernel in kernels)
