"""Gradients of what many tokens share are summed in fp32, never one bf16 add after another.

On CUDA the backward of ``index_select`` and its like adds rows by atomics in the dtype of the
tensor. ``RoundedAdds`` does the same on the CPU, whose own kernels accumulate in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_stub import phase, requires_stub, run_on_stub
from ranks import run_ranks
from tiny_models import TINY
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_sp.models import build_model
from opensora_sp.models.conditions import Conditioning, Text
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL, PatchGrid, Rows
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.plugin import SequenceParallelPlugin
from opensora_sp.plugin._colossalai import Booster

pytestmark = pytest.mark.core

# Operators that add where an index repeats. ``index_put`` does so with ``accumulate`` only, its
# fourth argument.
ADDING = {"index_add", "index_reduce", "scatter_add", "scatter_reduce", "embedding_dense_backward"}
PUTTING = {"index_put", "_index_put_impl", "_unsafe_index_put"}
BOUND = 0.03  # relative L2 error of a bf16 gradient


class RoundedAdds(TorchDispatchMode):
    """Adds rows as CUDA's atomics do: one after another, each sum rounded to the tensor's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1].rstrip("_")
        accumulates = name in PUTTING and len(args) > 3 and args[3]
        if name not in ADDING and not accumulates:
            return func(*args, **(kwargs or {}))

        self.calls.append((name, args[0].dtype))
        assert not kwargs, (name, kwargs)
        into = args[0] if func._schema.is_mutable else args[0].clone()
        if name == "index_add" and args[1] == 0:
            return add_row_by_row(into, args[2], args[3])
        if accumulates and len(args[1]) == 1:
            return add_row_by_row(
                into, args[1][0], args[2].expand(len(args[1][0]), *into.shape[1:])
            )
        raise NotImplementedError(
            f"emulate {func} on arguments of shapes {[getattr(a, 'shape', a) for a in args]}"
        )


def add_row_by_row(into: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    for target in index.unique().tolist():
        total = into[target]
        for row in rows[index == target].unbind():
            total.add_(row)
    return into


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def drawn(model: nn.Module, scale: float = 0.5) -> nn.Module:
    """All weights at random, so that nothing is hidden by zeros; exact in bf16."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "norm" not in name:
                fan_in = parameter[0].numel() if parameter.ndim > 1 else len(parameter)
                width = parameter.shape[-1] if "table" in name else fan_in
                parameter.normal_(std=scale / width**0.5, generator=generator)
                parameter.copy_(parameter.bfloat16())
    return model


def gradients(
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], list[tuple[str, torch.dtype]]]:
    """Gradients for a clip of 16 frames of 1024 patches whose first frame is a conditioning frame.

    Also the calls that added by index meanwhile.
    """
    settings = dict(TINY, in_channels=4, hidden_size=16, num_heads=1, caption_channels=8)
    model = build_model("STDiT3", **settings, pred_sigma=False)
    drawn(model).to(dtype)
    generator = torch.Generator().manual_seed(2)
    x, wanted = (torch.randn(1, 4, 16, 64, 64, generator=generator) for _ in range(2))
    y = torch.randn(1, 1, 6, 8, generator=generator)
    x_mask = torch.arange(16)[None] > 0
    loss = (model(x, torch.tensor([500.0]), y, x_mask=x_mask) - wanted).square().mean()
    with RoundedAdds() as adds:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, adds.calls


@pytest.mark.slow
def test_bf16_gradients_are_those_of_fp32_where_sums_are_rounded_add_by_add() -> None:
    exact, _ = gradients(torch.float32)
    found, added = gradients(torch.bfloat16)
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    assert len(errors) > 40
    assert not {name: error for name, error in errors.items() if error > BOUND}
    assert not added


def step(model: nn.Module, size: tuple[int, ...], **more: Any) -> None:
    batch = size[0]
    numbers = {name: torch.full((batch,), 8.0) for name in model.sample_inputs}
    x = torch.randn(batch, 4, *size[1:], requires_grad=True)
    y = torch.randn(batch, 1, 6, 8)
    t = torch.linspace(10, 900, batch)
    model(
        x, t, y, torch.arange(6) < torch.arange(1, batch + 1)[:, None], **numbers, **more
    ).sum().backward()


def some(name: str, **options: Any) -> nn.Module:
    settings = dict(TINY, in_channels=4, num_heads=2, caption_channels=8)
    model = build_model(name, **settings | options)
    return drawn(model).bfloat16()


def cases() -> Iterator[tuple[nn.Module, tuple[int, ...], dict[str, Any]]]:
    """Models, sizes of batches, and what else they are called with."""
    given = torch.tensor([[False, True, True], [True, True, True]])
    inside = torch.ones(2, 3, 4, 6, dtype=torch.bool)
    inside[1, 2:], inside[1, :, :, 4:] = False, False
    sized = dict(input_size=(3, 4, 6))
    windows = dict(kernel_size=(2, 2, -1), use_spatial_rope=True)
    conditions = dict(
        cond=torch.randn(2, 4, 3, 4, 6),
        cond_mask=torch.ones(2, 4, 3, 4, 6),
        mask_index=[0],
        y_null=torch.randn(2, 1, 6, 8),
    )
    for name, options in (("STDiT", sized), ("STDiT2", {}), ("STDiT3", {})):
        yield some(name, **options), (2, 3, 4, 6), {}
        yield some(name, **options), (2, 3, 4, 6), dict(x_mask=given, video_mask=inside)

    yield some("STDiT3", **windows), (2, 3, 4, 6), dict(x_mask=given)
    yield some("STDiT3", **windows), (2, 3, 4, 6), dict(video_mask=inside)
    yield some("STDiT3", full_attention=True), (2, 3, 4, 6), dict(video_mask=inside)
    yield some("STDiT3", **windows, use_cond=True), (2, 3, 4, 6), conditions


def assert_nothing_is_added_by_index(
    arrange: Callable[[nn.Module], nn.Module] = lambda model: model,
    recomputing: tuple[bool, ...] = (False, True),
) -> None:
    for model, size, more in cases():
        arrange(model)
        for recomputed in recomputing:
            model.set_grad_checkpoint(recomputed)
            with RoundedAdds() as adds:
                step(model, size, **more)
            assert not adds.calls, (type(model).__name__, sorted(more), recomputed)


def test_no_backward_adds_by_index() -> None:
    assert_nothing_is_added_by_index()


def on_ranks() -> None:
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)
    mesh = SequenceMesh(sp_size=3)  # 2 samples: the second rank holds parts of both
    assert_nothing_is_added_by_index(
        lambda model: parallelize(model, mesh, overlap_chunks=2, cost_model=free_links), (True,)
    )


@pytest.mark.slow
def test_no_backward_adds_by_index_on_ranks() -> None:
    run_ranks(3, on_ranks)


@pytest.mark.parametrize("layout", [SPATIAL, TEMPORAL])
@pytest.mark.parametrize("masked", [False, True])
def test_any_run_of_rows_takes_its_samples_entries(layout: str, masked: bool) -> None:
    """Values and gradients of entries picked by index, for every run of rows of three samples."""
    grid = PatchGrid(num_samples=3, latent_size=(3, 2, 2), patch_size=(1, 1, 1))
    given = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1]]).bool() if masked else None
    modulation = torch.randn(3, 1 + masked, 6, 8, dtype=torch.float64, requires_grad=True)
    whole = grid.rows(layout)
    for start in range(whole.total + 1):
        for stop in range(start, whole.total + 1):
            rows = whole.take(start, stop)
            weights = torch.randn(2, rows.count, rows.length, 8, dtype=torch.float64)
            condition = Conditioning(modulation, given, Text(torch.zeros(3, 8), [1, 1, 1])).of(
                TEMPORAL, rows
            )
            entries = condition.entries(torch.zeros(2, 8, dtype=torch.float64), 4, None)
            found = torch.stack([laid_out(entry, rows) for entry in entries])

            samples = rows.samples(torch.device("cpu"))[:, None]
            frames = rows.frames(torch.device("cpu")).expand(rows.count, rows.length)
            state = given[samples, frames].long() if masked else torch.zeros_like(frames)
            wanted = modulation[samples, state, 4:6].permute(2, 0, 1, 3)

            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            ours, theirs = (
                torch.autograd.grad((z * weights).sum(), modulation)[0] for z in (found, wanted)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def laid_out(entry: Tensor, rows: Rows) -> Tensor:
    """An entry ``[b, 1 or n, 1 or L, C]`` for each token held, ``[R, L, C]``."""
    n = rows.count // len(entry)
    return entry.expand(len(entry), n, rows.length, -1).flatten(0, 1)


def weight_gradients_on_the_device() -> None:
    """As in a custom training loop on one GPU; in bf16 and fp16."""
    mesh = SequenceMesh()
    for dtype in (torch.bfloat16, torch.float16):
        model = parallelize(some("STDiT3").to(dtype).cuda(), mesh)
        x, y = torch.randn(1, 4, 3, 4, 6).cuda(), torch.randn(1, 1, 6, 8).cuda()
        with phase("forward"):
            loss = model(x, torch.tensor([10.0]).cuda(), y).square().sum()
        with phase("backward"):
            loss.backward()


@requires_stub
def test_matrix_products_add_partial_sums_in_fp32() -> None:
    found = run_on_stub(weight_gradients_on_the_device)
    backward = found.in_phase("backward").gemms
    assert len(backward) > 100 and not any(gemm.reduced_precision for gemm in backward)
    # torch 2.5 has no setting for products with a bias, whose sums are over channels.
    calls = {gemm.call for gemm in found.in_phase("forward").gemms if gemm.reduced_precision}
    assert calls <= {"cublasLtMatmul"}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_mesh_switches_reduced_precision_off(name: str) -> None:
    matmul, setting = torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction"
    setattr(matmul, setting, True)
    SequenceMesh()
    assert getattr(matmul, setting) is False


def norm_of_bf16_gradients() -> None:
    """As ZeRO finds it, of gradients that sums of squares in bf16 would stagnate on."""
    model = nn.Linear(512, 512, bias=False).bfloat16()
    plugin = SequenceParallelPlugin(stage=2, precision="bf16", max_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer.backward(model(x).float().sum())
    shards = []
    for store in optimizer.pg_to_grad_store.values():
        shards += store.get_working_grads_by_group_id(0)
    assert {grad.dtype for grad in shards} == {torch.bfloat16}

    squares = sum(grad.double().square().sum() for grad in shards)
    dist.all_reduce(squares)
    optimizer.step()
    assert optimizer.get_grad_norm() == pytest.approx(squares.sqrt().item(), rel=1e-6)


def test_the_gradient_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    run_ranks(2, norm_of_bf16_gradients)
