"""Exchanges in bf16 and fp8: how far gradients move, and how many bytes are saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize
from opensora_sp.parallel.low_precision import BACKWARD, FORWARD, from_bytes, to_bytes

pytestmark = pytest.mark.core
# Largest relative L2 error of a gradient, bytes saved.
BOUNDS = {
    "bf16": (0.01, 2.0),
    "fp8": (0.10, 3.5),
}


def gradients_sent_as(
    dtype: str | None, checkpoint: bool
) -> tuple[dict[str, torch.Tensor], CommLedger]:
    torch.manual_seed(0)
    model = build_model(
        "STDiT3",
        hidden_size=96,
        depth=3,
        num_heads=4,
        mlp_ratio=2.0,
        caption_channels=8,
        model_max_length=6,
        patch_size=(1, 1, 1),
    )
    generator = torch.Generator().manual_seed(1)

    with torch.no_grad():
        for (
            name,
            p,
        ) in model.named_parameters():  # as in the middle of training: nothing zero, large gates
            if p.requires_grad and ("table" in name or not p.any()):
                p.copy_(
                    torch.randn(p.shape, generator=generator) * (0.5 if "table" in name else 0.1)
                )

    model.set_grad_checkpoint(checkpoint)
    parallelize(model, SequenceMesh(dist.get_world_size()), placement="branch", comm_dtype=dtype)
    x, target = (torch.randn(1, 4, 6, 8, 9, generator=generator) for _ in range(2))
    y = torch.randn(1, 1, 6, 8, generator=generator)
    with CommLedger() as counter:
        (model(x, torch.tensor([300.0]), y)[:, :4] - target).square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            found[name] = p.grad / dist.get_world_size()

    return found, counter


def compare() -> list[tuple[str, float, float]]:
    exact, plain = gradients_sent_as(None, checkpoint=True)
    results = []
    for dtype, (bound, saved) in BOUNDS.items():
        found, counter = gradients_sent_as(dtype, checkpoint=True)
        errors = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in exact.items()}
        worst = max(errors, key=errors.get)
        sent = [
            sum(n for (kind, _), n in one.bytes.items() if kind == "branch")
            for one in (plain, counter)
        ]
        assert not counter.calls["branch", "recompute"]
        assert 0 < errors[worst] <= bound, f"{dtype}: {worst} is off by {errors[worst]:.4f}"
        assert sent[0] >= saved * sent[1], (dtype, sent)
        results.append((dtype, errors[worst], sent[0] / sent[1]))
        again, _ = gradients_sent_as(dtype, checkpoint=False)
        # Checkpointing rounds the same.
        assert all(torch.equal(again[name], g) for name, g in found.items())

    return results


def test_gradients_and_bytes() -> None:
    for dtype, error, saved in run_ranks(2, compare)[0]:
        report = f"{dtype}: largest relative L2 error of a gradient {error:.4f}"
        print(f"{report}, {saved:.2f} times fewer bytes")


@pytest.mark.parametrize(
    ("narrow", "error"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)]
)
def test_rounding_to_8_bits_is_relative_to_each_token(narrow: torch.dtype, error: float) -> None:
    x = (
        torch.randn(50, 32, dtype=torch.float64)
        * torch.logspace(-20, 20, 50, dtype=torch.float64)[:, None]
    )
    x[3] = 0
    payload = to_bytes(x, narrow)
    assert payload.dtype == torch.uint8 and payload.shape == (50, 36)
    back = from_bytes(payload, narrow, x.dtype)
    largest = x.abs().amax(dim=1, keepdim=True)
    assert ((back - x).abs() <= error * x.abs() + 1e-4 * largest).all() and torch.equal(
        back[3], x[3]
    )
    assert from_bytes(to_bytes(x[:0], narrow), narrow, x.dtype).shape == (0, 32)


def test_gradients_have_the_wider_range() -> None:
    """A number of a token that is 2^20 times as large beside another: e5m2 keeps it, e4m3 not."""
    token = torch.tensor([[1.0, 2.0**-20]])
    kept = {
        name: from_bytes(to_bytes(token, narrow["fp8"]), narrow["fp8"], token.dtype)[0, 1].item()
        for name, narrow in (("forward", FORWARD), ("backward", BACKWARD))
    }
    assert kept == {"forward": 0.0, "backward": pytest.approx(2.0**-20, rel=2**-3)}
