"""What only a GPU can show. Needs torch and einops; the plugin's part needs ColossalAI as well."""

from __future__ import annotations

import copy
import importlib.util
import time

import pytest
import torch
from golden_models import CASES, built, inputs_of
from golden_values import close, load

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.attention import BACKENDS, attention
from opensora_sp.parallel import CommTimer
from opensora_sp.parallel.communication import communicating

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", CASES)
def test_golden_output_on_cuda(name: str) -> None:
    about, tensors = load("models", name)
    model = built(about, tensors)
    inputs = {
        key: value.cuda() if torch.is_tensor(value) else value
        for key, value in inputs_of(tensors).items()
    }
    close(model.cuda()(**inputs).cpu(), tensors["output"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_backends_agree(dtype: torch.dtype, backend: str) -> None:
    """Rows and packed tokens, forward and backward, against float64; lengths known to fail."""
    ran = 0
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}[dtype]
    for shape, lengths in [
        ((30, 100, 4, 72), None),
        ((3, 405, 4, 72), None),  # a length that 128 does not divide
        ((4, 192, 2, 64), None),  # 64 beyond 128
        ((70_000, 3, 2, 8), None),  # more rows than a grid has
        ((70_000, 1, 2, 8), None),  # images in temporal rows
        ((5, 7, 3, 12), None),  # heads that no fused kernel takes in 16 bits
        ((120, 4, 72), ([50, 0, 70], [60, 20, 40])),
        ((70_500, 2, 8), ([1] * 69_500 + [10] * 100, [1] * 69_500 + [10] * 100)),
        ((0, 9, 4, 72), None),
    ]:
        exact = [
            torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
            for _ in range(3)
        ]
        ours = [z.detach().to(dtype).requires_grad_() for z in exact]
        try:
            found = attention(*ours, lengths=lengths, backend=backend)
        except ValueError as refused:
            assert f"got attention '{backend}', but " in str(refused)
            continue
        ran += 1
        wanted = attention(*exact, lengths=lengths, backend="reference")

        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
        probe = torch.randn_like(wanted)
        (found * probe.to(dtype)).sum().backward()
        (wanted * probe).sum().backward()
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(
                a.grad.double(), b.grad, rtol=2 * tolerance, atol=2 * tolerance
            )
    assert ran or backend not in ("auto", "sdpa", "reference")
    if not ran:
        pytest.skip(f"{backend} cannot run here")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "lengths",
    [([4096], [300]), ([2990], [300]), ([3000, 0, 2001], [300, 7, 120]), ([2048, 2048], [80, 80])],
    ids=str,
)
def test_captions_in_pieces(lengths: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    """torch's kernels for packed tokens, keys shared by several pieces, forward and backward."""
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-4
    tokens = sum(lengths[0]), sum(lengths[1]), sum(lengths[1])
    exact = [
        torch.randn(n, 16, 72, device="cuda", dtype=torch.float64, requires_grad=True)
        for n in tokens
    ]
    ours = [z.detach().to(dtype).requires_grad_() for z in exact]
    found = attention(*ours, lengths=lengths, backend="sdpa")
    wanted = attention(*exact, lengths=lengths, backend="reference")
    probe = torch.randn_like(wanted)
    (found * probe.to(dtype)).sum().backward()
    (wanted * probe).sum().backward()

    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    for a, b in zip(ours, exact, strict=True):
        assert (a.grad.double() - b.grad).norm() <= tolerance * b.grad.norm()


def test_deterministic_gradients_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of ``deterministic=True`` that attention reads."""
    q, k, v = (
        torch.randn(4, 1024, 16, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    # Else memory is filled with NaN before each kernel, which no run does.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(attention(q, k, v).float().square().sum(), (q, k, v))
            for _ in range(10)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def output_and_gradients(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the same small batch each time, on the model's device."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(size, generator=generator).to(device, dtype)
        for size in ((2, 4, 5, 8, 8), (2, 1, 6, 8))
    )
    output = model(x, torch.tensor([100.0, 900.0], device=device), y)
    learned = [p for p in model.parameters() if p.requires_grad]
    return [output, *torch.autograd.grad(output.float().square().mean(), learned)]


def test_compiled_blocks_on_cuda() -> None:
    """With inductor in bf16: as near to float32 as plain blocks are, gradient by gradient.

    Gradients of queries are differences of nearly equal numbers, so that plain bf16 itself may be
    off by more than any fixed bound.
    """
    model = build_model(
        "STDiT3", hidden_size=144, depth=2, num_heads=2, caption_channels=8, model_max_length=6
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    model = model.bfloat16()
    exact = output_and_gradients(copy.deepcopy(model).cuda().float(), torch.float32)

    model = model.cuda()
    plain = output_and_gradients(model, torch.bfloat16)
    compile_blocks(model, backend="inductor")
    compiled = output_and_gradients(model, torch.bfloat16)
    for wanted, without, found in zip(exact, plain, compiled, strict=True):
        error, allowed = ((z.float() - wanted).norm() for z in (found, without))
        assert error <= 2 * allowed + 1e-2 * wanted.norm() + 1e-6


def test_time_in_communication_is_that_of_the_stream() -> None:
    """The host continues meanwhile, and events serve again."""
    device = torch.device("cuda")
    timer = CommTimer(device)
    torch.cuda._sleep(1)  # what happens once
    torch.cuda.synchronize()

    for _ in range(2):
        with timer:
            for kind, where in (("switch", device), ("check", torch.device("cpu"))):
                began = time.perf_counter()
                with communicating(kind, where):
                    torch.cuda._sleep(10**9)  # some tenths of a second
                assert time.perf_counter() - began < 0.05
        whole = time.perf_counter()
        torch.cuda.synchronize()
        whole = time.perf_counter() - whole
        # One of the two was the host's, beside the stream.
        assert timer.take() == pytest.approx(whole / 2, rel=0.3)
        assert timer.take() == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_boosted_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("colossalai") is None:
        pytest.skip("no ColossalAI")
    from opensora_sp.plugin import SequenceParallelPlugin, launch
    from opensora_sp.plugin._colossalai import Booster

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch(seed=0)
    model = build_model(
        "STDiT3", hidden_size=144, depth=2, num_heads=2, caption_channels=8, model_max_length=6
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = SequenceParallelPlugin(precision=precision, max_norm=1.0)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    x, y = torch.randn(2, 4, 5, 8, 8, device="cuda"), torch.randn(2, 1, 6, 8, device="cuda")
    losses = []
    for _ in range(20):
        loss = (model(x, torch.tensor([100.0, 900.0], device="cuda"), y)[:, :4] - x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
