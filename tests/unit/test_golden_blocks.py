"""Every case of the reference values of blocks, and what test_golden_models.py does not check."""

from __future__ import annotations

import pytest
import torch
from golden_models import block_cases, with_state
from golden_values import close

from opensora_sp.models import PatchGrid
from opensora_sp.models.layers import RMSNorm, SelfAttention, timestep_sinusoid
from opensora_sp.models.positions import RotaryEmbedding
from opensora_sp.models.token_layout import TEMPORAL

pytestmark = pytest.mark.core


def test_timestep_sinusoids() -> None:
    seen = 0
    for case, tensors in block_cases("timestep_embedder"):
        if case["case"].startswith("sinusoid"):
            seen += 1
            close(
                timestep_sinusoid(tensors["input/t"], case["dim"], case["max_period"]),
                tensors["output"],
            )
    assert seen == 3


def test_queries_and_keys_before_and_after_norm_and_rotation() -> None:
    seen = 0
    for case, tensors in block_cases("rotary_attention"):
        if not case["case"].startswith("attn"):
            continue
        seen += 1
        rope = RotaryEmbedding(case["hidden"] // case["heads"]) if case["rotary"] else None
        options = dict(qk_norm=case["qk_norm"], rope=rope, norm_last=case["qk_norm_legacy"])
        attention = with_state(SelfAttention(case["hidden"], case["heads"], **options), tensors)
        handed_on = []
        attention.attend.register_forward_pre_hook(
            lambda _, args, kept=handed_on: kept.extend(args[:2])
        )
        x = tensors["input/x"]
        rows = PatchGrid(
            num_samples=1, latent_size=(x.shape[1], 1, len(x)), patch_size=(1, 1, 1)
        ).rows(TEMPORAL)
        attention(x, rows)
        before = attention.qkv(x).unflatten(-1, (3, case["heads"], -1)).unbind(2)[:2]

        for ours, after, name in zip(before, handed_on, "qk", strict=True):  # [R, L, H, D]
            close(ours.transpose(1, 2), tensors[f"{name}_in"])
            close(after.transpose(1, 2), tensors[f"{name}_out"])

    assert seen == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_exact_to_the_precision_of_queries(dtype: torch.dtype) -> None:
    for _, tensors in [
        pair for pair in block_cases("rotary_attention") if pair[0]["case"].startswith("rope")
    ]:
        q = tensors["input/q"].transpose(1, 2).to(dtype)
        rope = RotaryEmbedding(q.shape[-1])
        rows = PatchGrid(
            num_samples=len(q), latent_size=(q.shape[1], 1, 1), patch_size=(1, 1, 1)
        ).rows(TEMPORAL)
        rotation = rope.rotation(rows, False, q.device)
        exact = rope(q.double(), rotation).to(dtype)
        torch.testing.assert_close(
            rope(q, rotation), exact, rtol=torch.finfo(dtype).eps * 2, atol=torch.finfo(dtype).eps
        )


def test_norm_and_rotation_have_the_gradients_of_their_definitions() -> None:
    norm, rope = RMSNorm(6).double(), RotaryEmbedding(6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    rotation = rope.rotation(PatchGrid(2, (3, 1, 1), (1, 1, 1)).rows(TEMPORAL), False, x.device)
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradcheck(lambda x: rope(x, rotation), x)

    # As complex numbers that are multiplied by others of length 1.
    angles = torch.arange(3)[:, None, None] * rope.freqs
    pairs = torch.view_as_complex(x.detach().unflatten(-1, (-1, 2)))
    wanted = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(rope(x, rotation), wanted, rtol=1e-6, atol=1e-6)


def test_norm_and_rotation_round_once() -> None:
    """In bf16: computed in fp32, and rounded where the result is written."""
    norm, rope = RMSNorm(72), RotaryEmbedding(72)
    x = torch.randn(4, 5, 2, 72).bfloat16()
    rotation = rope.rotation(PatchGrid(4, (5, 1, 1), (1, 1, 1)).rows(TEMPORAL), False, x.device)
    assert torch.equal(norm.bfloat16()(x), norm.float()(x.float()).bfloat16())
    assert torch.equal(rope(x, rotation), rope(x.float(), rotation).bfloat16())
