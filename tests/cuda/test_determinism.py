"""``deterministic=True``: which sums have a fixed order, and what is refused.

The functions that run under the stub of CUDA are at the top level of this file; names begin with
`on_`.
"""

from __future__ import annotations

import os

import pytest
import torch
from cuda_stub import requires_stub, run_on_stub

from opensora_sp.models import build_model
from opensora_sp.models.conditions import Text
from opensora_sp.training.run import use_deterministic_kernels

WIDTH = 144


@pytest.fixture(autouse=True)
def _flags_as_before(monkeypatch: pytest.MonkeyPatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    kept = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept


def test_what_is_set_before_a_run() -> None:
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def on_a_training_step(name: str) -> None:
    from opensora_sp.diffusion import rank_loss, velocity_loss

    use_deterministic_kernels()
    size = dict(input_size=(4, 8, 8)) if name == "STDiT" else {}
    options = dict(
        hidden_size=WIDTH, depth=1, num_heads=2, caption_channels=8, model_max_length=6, **size
    )
    model = build_model(name, **options).cuda().bfloat16()
    model.set_grad_checkpoint(True)
    x = torch.zeros(2, 4, 4, 8, 8, device="cuda")
    tokens = torch.zeros(9, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    numbers = {number: torch.full((2,), 8.0, device="cuda") for number in model.sample_inputs}
    x_mask = torch.ones(2, 4, dtype=torch.bool, device="cuda")
    out = model(
        x, torch.full((2,), 500.0, device="cuda"), Text(tokens, [6, 3]), x_mask=x_mask, **numbers
    )
    rank_loss(velocity_loss(out, x), global_samples=2, world_size=1).backward()


@requires_stub
@pytest.mark.parametrize("name", ["STDiT", "STDiT2", "STDiT3"])
def test_every_model_trains_without_unordered_sums(name: str) -> None:
    """torch raises for operators without a deterministic form and cuBLAS without a workspace."""
    kernels = run_on_stub(
        on_a_training_step, name, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ).kernels()
    assert any("flash_bwd" in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if "indexFunc" in kernel or "scatter" in kernel], (
        kernels
    )
