"""Attention on CUDA's code paths: what is compiled, and which kernels run in which grids.

The functions that run under the stub are at the top level of this file; their names begin with `on_`.
"""

from __future__ import annotations

import torch
from cuda_stub import build, phase, requires_stub, run_on_stub

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.attention import attention
from opensora_sp.models.conditioning import Text

pytestmark = requires_stub
WIDTH, HEADS = 144, 2
SMALL = dict(hidden_size=WIDTH, depth=2, num_heads=HEADS, caption_channels=8, model_max_length=6)
V13 = dict(kernel_size=(2, 2, -1), use_spatial_rope=True, qk_norm=True)
TEXTS = (6, 3)


def cache() -> dict[str, str]:
    """Compiled code is kept beside the stub: cold, a model takes a minute."""
    folder = build.CACHE.parent / "cuda_compiled"
    return {
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def step(model: torch.nn.Module, text_lengths: tuple[int, ...]) -> None:
    """Forward and backward; the text is encoded, for a mask would be read from meaningless values."""
    x = torch.zeros(len(text_lengths), 4, 5, 8, 8, device="cuda")
    tokens = torch.zeros(sum(text_lengths), WIDTH, device="cuda", dtype=torch.bfloat16)
    text = Text(tokens.requires_grad_(), list(text_lengths))
    timestep = torch.full((len(text_lengths),), 500.0, device="cuda")
    model(x, timestep, text).square().mean().backward()


def on_compiled_blocks(config: dict, backend: str) -> tuple[int, list[str]]:
    """Graphs compiled, and why graphs ended."""
    from torch._dynamo.utils import counters

    model = build_model("STDiT3", **SMALL, **config).cuda().bfloat16()
    compile_blocks(model, backend=backend)
    for checkpointing in (False, True):
        model.set_grad_checkpoint(checkpointing)
        phase("checkpointing" if checkpointing else "plain")
        step(model, TEXTS)
    phase("after")
    found = counters["stats"]["unique_graphs"], list(counters["graph_break"])

    # The same names serve eager code afterwards.
    phase("eager")
    q = torch.zeros(3, 8, HEADS, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q)
    return found


def test_inductor_compiles_the_blocks() -> None:
    """A step of a compiled model runs Triton's kernels and, in each self-attention, FlashAttention's."""
    recording = run_on_stub(on_compiled_blocks, {}, "inductor", timeout=600, env=cache())

    graphs, breaks = recording.result
    assert graphs == 4 + 4  # of a spatial and of a temporal part; see test_compile.py
    assert breaks and all("_attend_packed" in reason for reason in breaks)
    for name in ("plain", "checkpointing"):
        kernels = recording.in_phase(name).kernels()
        assert any(kernel.startswith("triton_") for kernel in kernels), kernels
        assert not any("softmax" in kernel for kernel in kernels), kernels
    assert recording.in_phase("eager").kernels()["pytorch_flash::flash_fwd_kernel"] == 1
