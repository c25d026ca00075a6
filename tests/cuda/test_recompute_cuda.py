"""The bytes that each level of gradient checkpointing saves on CUDA's code paths.

torch's caching allocator counts them: a policy that names operators which CUDA does not call would
save nothing, and nobody would notice.
"""

from __future__ import annotations

import pytest
import torch
from cuda_cases import cache
from cuda_stub import phase, requires_stub, run_on_stub

from opensora_sp.models.recompute import EVERYTHING, OFFLOADED

pytestmark = requires_stub

WIDTH, SIZE = 1152, (16, 32, 32)  # of XL/2: 16 heads of 72
TOKENS = 16 * 16 * 16
# Activations of a token that a block keeps on the device at each level, from OFFLOADED on.
KEPT = (0, 1, 2, 3, 4, 7, 10, 14)
# The inputs of all operators in plain torch: norms in fp32, rotary positions, GELU's input and
# output; and those of the Triton kernels.
KEPT_OF_EVERYTHING = {"torch": 27, "triton": 23}


def on_levels(kernels: str) -> None:
    from opensora_sp.models import build_model
    from opensora_sp.models.kernels import set_kernels

    set_kernels(kernels)
    text = dict(caption_channels=8, model_max_length=6)
    for depth in (1, 2):
        model = build_model("STDiT3", hidden_size=WIDTH, depth=depth, num_heads=16, **text)
        model = model.to("cuda", torch.bfloat16)
        x, t = torch.zeros(1, 4, *SIZE, device="cuda"), torch.zeros(1, device="cuda")
        y, drop = torch.zeros(1, 1, 6, 8, device="cuda"), torch.ones(1, dtype=torch.bool)

        # The first pass also allocates tables and cuBLAS's workspaces, which stay.
        for level in (EVERYTHING, *range(OFFLOADED, EVERYTHING + 1)):
            model.set_grad_checkpoint([level] * 2 * depth)
            phase(f"depth {depth}, level {level}")
            out = model(x, t, y, drop_caption=drop)
            phase("backward")
            out.sum().backward()
            del out
            model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_saved_bytes(kernels):
    recording = run_on_stub(on_levels, kernels, env=cache(), timeout=600)
    # Of two phases of the same name the second.
    memory = {one.phase: one.after - one.before for one in recording.memory}

    for level in range(OFFLOADED, EVERYTHING + 1):
        pair = memory[f"depth 2, level {level}"] - memory[f"depth 1, level {level}"]
        kept = pair / 2 / (TOKENS * WIDTH * 2)
        expected = (*KEPT, KEPT_OF_EVERYTHING[kernels])[level - OFFLOADED]
        # Small tensors of a pass differ by up to a megabyte, a tenth of an activation.
        assert kept == pytest.approx(expected, rel=0.04, abs=0.12), level
