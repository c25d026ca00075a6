"""Sequence parallelism gives the one-process result: output, input gradients and every parameter gradient, in float64.

All parameters are drawn at random first (zero-initialised gates hide errors), and gradients are compared after
averaging over the ranks, as ZeRO and DDP average them.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import Point, build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize, unwrap
from opensora_sp.parallel.collectives import exchange
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.layout import SPATIAL_ROWS, TEMPORAL_ROWS, plan_exchange

pytestmark = pytest.mark.core
DEPTH = 2


@dataclass(frozen=True)
class Case:
    size: tuple[int, int, int, int]  # B, frames, height, width
    patch: tuple[int, int, int] = (1, 2, 2)
    heads: int = 3
    mask: bool = False
    x_mask: bool = False
    drop_caption: bool = False
    drop_path: bool = False
    checkpoint: bool = False
    output: str = "shards"


PLAIN = [
    Case((1, 5, 7, 9)),
    Case((2, 3, 5, 6)),
    Case((3, 5, 6, 5), output="full"),
    Case((1, 1, 4, 3)),  # an image: ranks beyond the first hold no spatial row
    Case((1, 16, 2, 2)),  # one patch per frame: all but one rank hold no temporal row
    Case((1, 7, 5, 7), patch=(2, 2, 2)),
]
FULL = replace(Case((1, 1, 1, 1)), mask=True, x_mask=True, drop_caption=True, drop_path=True)
CASES = [
    *PLAIN,
    *(replace(case, checkpoint=True) for case in PLAIN[:4]),
    Case((1, 2, 3, 5), heads=4, checkpoint=True),  # two frames: heads are split from three ranks on
    *(
        replace(FULL, size=size, patch=patch, checkpoint=checkpoint, output=output)
        for size, patch in [
            ((1, 5, 7, 9), (1, 2, 2)),
            ((2, 5, 5, 7), (2, 2, 2)),
            ((3, 3, 6, 5), (1, 2, 2)),
        ]
        for checkpoint in (False, True)
        for output in ("full", "shards")
    ),
    replace(PLAIN[0], mask=True),
    replace(PLAIN[1], x_mask=True),
    replace(PLAIN[2], drop_path=True, output="shards"),
    replace(PLAIN[3], drop_caption=True, mask=True),
]


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(
        "STDiT3", in_channels=2, hidden_size=4 * case.heads, depth=DEPTH, num_heads=case.heads, patch_size=case.patch,
        caption_channels=5, model_max_length=6, mlp_ratio=2.0, drop_path=0.3, input_sq_size=16,
    ).double()  # fmt: skip
    return drawn(model, case)


def drawn(model: torch.nn.Module, case: Case) -> torch.nn.Module:
    """With all parameters drawn at random, and checkpointed as the case says."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            )
    model.set_grad_checkpoint(case.checkpoint)
    return model


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, frames, height, width = case.size
    inputs = dict(
        x=normal(B, 2, frames, height, width).requires_grad_(),
        timestep=torch.linspace(900, 100, B, dtype=torch.float64),
        y=normal(B, 1, 6, 5).requires_grad_(),
        fps=torch.full((B,), 8.0, dtype=torch.float64),
        height=torch.full((B,), 20.0, dtype=torch.float64),
        width=torch.full((B,), 24.0, dtype=torch.float64),
    )
    if case.mask:
        lengths = torch.tensor([4, 6, 0])[:B]  # no token in use counts as the first one
        inputs["mask"] = (torch.arange(6) < lengths[:, None]).long()
    if case.x_mask:
        of_patch = torch.rand(B, -(-frames // case.patch[0]), generator=generator) < 0.5
        of_patch[0, 0] = True
        inputs["x_mask"] = of_patch.repeat_interleave(case.patch[0], dim=1)[:, :frames]
    if case.drop_caption:
        inputs["drop_caption"] = torch.arange(B) == B - 1
    if case.drop_path:
        inputs["drop_path"] = torch.rand(2 * DEPTH, B, generator=generator) < 0.3
    return inputs


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    found.update(x=inputs["x"].grad, y=inputs["y"].grad)
    for name, gradient in found.items():
        if name == "y" and gradient is None:  # every caption dropped
            found[name] = torch.zeros_like(inputs["y"])
        else:
            assert gradient is not None, f"{name} has no gradient"
    return found


def run_step(
    case: Case, mesh: SequenceMesh | None, **options
) -> tuple[torch.Tensor, dict[str, torch.Tensor], CommLedger]:
    """Output (whole), gradients averaged over the ranks, and what was sent; without a mesh, in one process."""
    model, inputs = make_model(case), make_inputs(case)
    target = torch.randn(
        inputs["x"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    x_mask = inputs.get("x_mask")
    ranks, shards = 1, {}
    if mesh is not None:
        parallelize(model, mesh, **options)
        ranks, shards = mesh.sp_size, dict(output="shards")
    with torch.no_grad():
        whole = model(**inputs)
    with CommLedger() as ledger:
        if case.output == "shards":
            losses = velocity_loss(model(**inputs, **shards), target, x_mask)
            rank_loss(losses, global_samples=len(target), world_size=ranks).backward()
        else:
            velocity_loss(model(**inputs), target, x_mask).mean().backward()
    found = gradients(model, inputs)
    if mesh is not None:
        for gradient in found.values():
            dist.all_reduce(gradient)
            gradient /= ranks
    return whole, found, ledger


@cache
def one_process_step(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor], CommLedger]:
    return run_step(case, None)


def assert_one_process_result(case: Case, mesh: SequenceMesh, **options) -> CommLedger:
    whole, found, ledger = run_step(case, mesh, **options)
    reference, wanted, _ = one_process_step(case)
    largest = max(g.abs().max().item() for g in wanted.values())
    pairs = {"output": (whole, reference), **{name: (found[name], wanted[name]) for name in wanted}}
    for name, (ours, theirs) in pairs.items():
        allowed = 1e-9 * theirs.abs().max().item() + 1e-12 * largest
        difference = (ours - theirs).abs().max().item()
        assert difference <= allowed, (
            f"{case} {options}: {name} differs by {difference}, allowed {allowed}"
        )
    return ledger


def compare_on_ranks(cases: list[Case]) -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    # At so small a width splitting heads costs less only where communication costs nothing.
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)
    for case in cases:
        ledger = assert_one_process_result(case, mesh, cost_model=free_links)
        whole_samples = case.size[0] % mesh.sp_size == 0
        few_rows = case.size[0] * -(-case.size[1] // case.patch[0]) < mesh.sp_size
        switches = 0 if whole_samples or few_rows else 2 * DEPTH - 1
        heads = 2 * DEPTH if few_rows else 0  # q, k, v there and the output back
        for kind, calls in [("switch", switches), ("heads", heads)]:
            assert ledger.calls[kind, "forward"] == ledger.calls[kind, "backward"] == calls, (
                case,
                ledger.calls,
            )
        assert not [key for key in ledger.calls if key[1] == "recompute"], ledger.calls
        if case.output == "shards":
            assert not ledger.calls["gather", "forward"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_output_and_every_gradient_equal_one_process(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_on_ranks, CASES)


def gradients_of_rank_losses() -> None:
    """Losses that differ from rank to rank: the mean gradient is that of their mean, not of one of them times P."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    case = Case((1, 5, 7, 9), output="full")
    weights = [
        torch.randn(1, 4, 5, 7, 9, generator=torch.Generator().manual_seed(i)).double()
        for i in range(2)
    ]
    model = parallelize(make_model(case), mesh)
    (model(**make_inputs(case)) * weights[mesh.sp_rank]).sum().backward()
    reference = make_model(case)
    (reference(**make_inputs(case)) * (weights[0] + weights[1]) / 2).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(
                parameter.grad / 2, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-9
            )


def test_gather_backward_is_the_exact_adjoint() -> None:
    run_ranks(2, gradients_of_rank_losses)


def sample_then_train() -> None:
    """What a forward under inference mode leaves cached serves training, too."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    case = Case((1, 3, 4, 10))
    model = parallelize(make_model(case), mesh)
    with torch.inference_mode():
        model(**make_inputs(case))
    model(**make_inputs(case)).square().mean().backward()
    for group, size in ((mesh.sp_group, mesh.sp_size), (mesh.dp_group, mesh.dp_size)):
        assert dist.get_world_size(group) == size  # a group of one rank is a group, not the world


def test_training_after_sampling_and_the_groups() -> None:
    run_ranks(2, sample_then_train)


def compiled_switch() -> None:
    """The switch lies inside one compiled graph, forward and backward, with the results of the plain one."""
    axes, cpu = {"b": 1, "t": 5, "s": 6}, torch.device("cpu")
    plan = plan_exchange(
        axes, SPATIAL_ROWS, TEMPORAL_ROWS, dist.get_world_size(), dist.get_rank(), cpu
    )

    def around(x: torch.Tensor) -> torch.Tensor:
        return exchange(x * 2, plan, dist.group.WORLD).sin()

    results = []
    for function in (around, torch.compile(around, fullgraph=True, backend="aot_eager")):
        x = torch.randn(
            len(plan.pack), 3, generator=torch.Generator().manual_seed(0), requires_grad=True
        )
        with CommLedger() as ledger:
            y = function(x)
            y.square().sum().backward()
        assert ledger.calls == {("switch", "forward"): 1, ("switch", "backward"): 1}
        results.append((y, x.grad))
    (y, grad), (compiled_y, compiled_grad) = results
    assert torch.equal(y, compiled_y) and torch.equal(grad, compiled_grad)


def test_torch_compile_takes_the_switch_into_its_graph() -> None:
    run_ranks(3, compiled_switch)


def test_sp_size_1_is_bitwise_the_bare_model_and_unwrap_restores_it() -> None:
    case = replace(FULL, size=(2, 5, 7, 9))
    bare, wrapped = make_model(case), make_model(case)
    names, points = list(wrapped.state_dict()), dict(wrapped.named_modules())
    assert parallelize(wrapped, SequenceMesh(sp_size=1)) is wrapped
    assert type(wrapped) is type(bare) and list(wrapped.state_dict()) == names
    inputs = make_inputs(case)
    assert torch.equal(wrapped(**inputs), bare(**inputs))
    shard = wrapped(**inputs, output="shards")
    inside = shard.layout.inside(shard.tensor.device)  # [R, T, V]; the rest is padding
    of_patch = (inside.shape[-1], -1)
    ours, theirs = (
        z.unflatten(-1, of_patch) for z in (shard.tensor, shard.layout.slice(bare(**inputs)))
    )
    assert torch.equal(ours[inside], theirs[inside])
    assert unwrap(wrapped) is wrapped and dict(wrapped.named_modules()) == points
    assert all(point.attached is None for point in wrapped.modules() if isinstance(point, Point))
    with pytest.raises(TypeError, match="output"):
        wrapped(**inputs, output="shards")
    assert torch.equal(wrapped(**inputs), bare(**inputs))


def test_what_cannot_be_parallelized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(make_model(PLAIN[0]), SequenceMesh(1))
    with pytest.raises(ValueError, match="got a model that is parallelized already"):
        parallelize(model, SequenceMesh(1))
    with pytest.raises(ValueError, match="got output='half'; expected 'full' or 'shards'"):
        model(**make_inputs(PLAIN[0]), output="half")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="copy before parallelize"):
            copied(model)
    with pytest.raises(ValueError, match=r"call unwrap\(model.module\)"):
        unwrap(torch.nn.DataParallel(model))
    around = torch.nn.Sequential(torch.nn.Sequential(model))
    with pytest.raises(ValueError, match=r"call unwrap\(model.0.0\)"):
        unwrap(around)
    assert model(**make_inputs(PLAIN[0]), output="shards").layout.total == 20
    assert torch.is_tensor(
        model.forward(**make_inputs(PLAIN[0]))
    )  # which passes by the hook that takes "output"
    with pytest.raises(
        ValueError,
        match=r"got a model of class Linear with sharding_points None.*register_plan\(Linear",
    ):
        parallelize(torch.nn.Linear(1, 1), SequenceMesh(1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got 2 processes without a process group"):
        SequenceMesh(2)
    with torch.device("meta"):
        skeleton = build_model("STDiT3", hidden_size=8, num_heads=2, depth=1, caption_channels=5)
    assert torch.equal(skeleton.to_empty(device="cpu").rope.freqs, torch.tensor([1.0, 0.01]))
