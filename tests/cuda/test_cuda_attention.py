"""Attention on CUDA's code paths: which kernels run in which grids.

The functions that run under the stub are at the top level of this file; names begin with `on_`.
"""

from __future__ import annotations

import math

import pytest
import torch
from cuda_stub import Recording, phase, requires_stub, run_on_stub

from opensora_sp.models import build_model
from opensora_sp.models.attention import attention
from opensora_sp.models.conditions import Text

pytestmark = requires_stub
WIDTH, HEADS = 144, 2
SMALL = dict(hidden_size=WIDTH, depth=2, num_heads=HEADS, caption_channels=8, model_max_length=6)
V13 = dict(kernel_size=(2, 2, -1), use_spatial_rope=True, qk_norm=True)
TEXTS = (6, 3)


def step(model: torch.nn.Module, text_lengths: tuple[int, ...]) -> None:
    """Forward and backward; the text is encoded: a mask would be read from meaningless values."""
    x = torch.zeros(len(text_lengths), 4, 5, 8, 8, device="cuda")
    tokens = torch.zeros(sum(text_lengths), WIDTH, device="cuda", dtype=torch.bfloat16)
    text = Text(tokens.requires_grad_(), list(text_lengths))
    timestep = torch.full((len(text_lengths),), 500.0, device="cuda")
    model(x, timestep, text).square().mean().backward()


def on_cross_attention(queries: list[int], keys: list[int], dtype_name: str = "bfloat16") -> None:
    """Forward and backward from tokens to text, with the heads of STDiT3-XL/2."""
    dtype = getattr(torch, dtype_name)
    q, k, v = (
        torch.zeros(tokens, 16, 72, device="cuda", dtype=dtype, requires_grad=True)
        for tokens in (sum(queries), sum(keys), sum(keys))
    )
    phase("forward")
    out = attention(q, k, v, lengths=(queries, keys))
    phase("backward")
    out.backward(torch.ones_like(out))


def attention_blocks(recording: Recording, kernel: str) -> list[int]:
    """Blocks of threads of each launch of such a kernel."""
    return [math.prod(launch.grid) for launch in recording.launches if kernel in launch.name]


@pytest.mark.parametrize("queries", [16 // 8 * 256, 15 * 1590])
def test_one_caption_fills_the_device_in_backward(queries: int) -> None:
    """A rank's shard of one clip; the kernel of 128 keys, 16 heads and 132 multiprocessors."""
    recording = run_on_stub(on_cross_attention, [queries], [300])

    (blocks,) = attention_blocks(recording, "flash_bwd_dq_dk_dv")
    assert blocks >= 132
    # Keys are not copied for the pieces; their gradients are summed over these.
    assert not any("copy" in name for name in recording.in_phase("forward").kernels())


def on_two_depths() -> None:
    """A step in which recomputation asks for the text again."""
    for depth in (1, 3):
        model = build_model("STDiT3", **SMALL | dict(depth=depth)).cuda().bfloat16()
        model.set_grad_checkpoint(True)
        phase(f"depth {depth}")
        step(model, TEXTS)
        phase("next")


def test_blocks_copy_nothing_to_the_device() -> None:
    recording = run_on_stub(on_two_depths)

    copies = {depth: recording.in_phase(f"depth {depth}").copies for depth in (1, 3)}
    from_host = {
        depth: [copy.where for copy in copies[depth] if copy.kind == "H2D"] for depth in copies
    }
    assert from_host[1] == from_host[3]
    edges = [copy for copy in copies[3] if "tensors.py" in copy.where]
    assert len(edges) == 2  # one of either layout
    assert not any(copy.blocking for copy in edges)


def on_autocast() -> None:
    """Packed self-attention in fp32 weights, and text that was encoded outside of autocast."""
    model = build_model("STDiT3", **SMALL, **V13).cuda()
    x, timestep = torch.zeros(2, 4, 5, 8, 8, device="cuda"), torch.zeros(2, device="cuda")
    features = torch.zeros(2, 1, 6, 8, device="cuda")
    for y in (features, model.encode_text(features)):
        phase("features" if y is features else "encoded")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, timestep, y).square().mean()
        loss.backward()
    phase("end")


def test_autocast_reaches_packed_attention() -> None:
    """Norms leave queries and keys in fp32 and values in bf16, which no kernel takes."""
    recording = run_on_stub(on_autocast)
    features, encoded = (recording.in_phase(name).kernels() for name in ("features", "encoded"))
    assert features["pytorch_flash::flash_fwd_kernel"] == 2 * 4  # self- and cross-attention
    assert sum("fmha_cutlassF" in name for name in features) == 0
    assert encoded["pytorch_flash::flash_fwd_kernel"] >= 4
