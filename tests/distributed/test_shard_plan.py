"""Models without hook points, by a plan: the example of the docs, every option, refusals."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from random_weights import draw_weights
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from opensora_sp.models import STDiT3
from opensora_sp.parallel import (
    CommLedger,
    SequenceMesh,
    ShardPlan,
    parallelize,
    register_plan,
    unwrap,
)
from opensora_sp.parallel.shard_plan import plan_of

pytestmark = pytest.mark.core
DOCUMENT = Path(__file__).parents[2] / "docs/custom_model.md"


class Attention(nn.Module):
    def __init__(self, width: int, over: str) -> None:
        super().__init__()
        self.qkv, self.over = nn.Linear(width, 3 * width), over

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = x if self.over == "s" else x.transpose(1, 2)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        h = h if self.over == "s" else h.transpose(1, 2)
        return h if mask is None else h * mask[..., None]


class Branches(nn.Module):
    """Tokens ``[B, T, S, C]``; attentions are branches, whose results are added."""

    def __init__(self, width: int = 6, called: str = "module") -> None:
        super().__init__()
        self.spatial = nn.ModuleList(Attention(width, "s") for _ in range(2))
        self.temporal = nn.ModuleList(Attention(width, "t") for _ in range(2))
        self.enter, self.head, self.called = nn.Identity(), nn.Linear(width, width), called

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.enter(x)
        for spatial, temporal in zip(self.spatial, self.temporal, strict=True):
            for attention, m in ((spatial, mask), (temporal, None)):
                x = x + checkpoint(self._function(attention), x, m, use_reentrant=False)
        return x if self.called == "no head" else self.head(x)

    def _function(self, attention: nn.Module):
        if self.called == "class":
            return partial(Attention.forward, attention)
        return attention.forward if self.called == "method" else attention


class Block(Attention):
    """Hands on the residual stream, and something beside it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple:
        return x + super().forward(x, mask), mask


class Stream(Branches):
    """Tokens ``[B, T, S, C]``; blocks follow each other. The first block is where tokens enter."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.spatial = nn.ModuleList(Block(width, "s") for _ in range(2))
        self.temporal = nn.ModuleList(Block(width, "t") for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for spatial, temporal in zip(self.spatial, self.temporal, strict=True):
            x, _ = spatial(x, mask)
            x, _ = temporal(x)
        return self.head(x)


PLAN = ShardPlan(
    enter="enter",
    spatial=("spatial.*",),
    temporal=("temporal.*",),
    leave="head",
    placement="branch",
    arguments={"mask": "b t s"},
)
STREAM_PLAN = replace(PLAN, enter="spatial.0", placement="stream")
KEPT = [{}, dict(recompute_communication=True), dict(strategy="split_gather")]
SIZES = [(1, 5, 7), (2, 3, 4), (1, 1, 5), (2, 4, 1)]  # with ranks without a frame, or a patch


def compare(
    model: nn.Module,
    mesh: SequenceMesh,
    *inputs: torch.Tensor,
    allowed: float | None = None,
    **options,
) -> None:
    """Output, input gradient and every parameter gradient against the bare model, in float64.

    With ``allowed``, up to this relative error of each tensor.
    """
    results = []
    for wrapped in (False, True):
        if wrapped:
            parallelize(model, mesh, verify=True, **options)
        leaves = [z.clone().requires_grad_() for z in inputs]
        model.zero_grad()
        output = model(*leaves)
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
        gradients = [z.grad for z in leaves] + [p.grad for p in model.parameters()]
        if wrapped:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= mesh.sp_size
        results.append([output, *(g.clone() for g in gradients)])

    for ours, theirs in zip(*results, strict=True):
        if allowed is None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        else:
            assert (ours - theirs).norm() <= allowed * theirs.norm() + 1e-11

    assert_bare(unwrap(model))


def assert_bare(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert "forward" not in vars(module)


def planned_models() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    torch.manual_seed(1)
    register_plan(Branches, PLAN)
    register_plan(Stream, STREAM_PLAN)

    for size in SIZES:
        inputs = torch.randn(*size, 6).double(), torch.rand(*size).double()
        for model_class in (Branches, Stream):
            for options in KEPT:
                compare(model_class().double(), mesh, *inputs, **options)

    space: dict = {"__name__": "example"}
    # Those with a file name are of derived models (test_derived_models.py).
    blocks = re.findall(r"```python\n(?!# \w+/)(.*?)```", DOCUMENT.read_text(), flags=re.S)
    assert len(blocks) == 4

    for block in blocks:
        exec(block, space)
    with CommLedger() as counter:
        # A clip, two frames and an image, in which ranks have no frame or no patch.
        for samples, frames, side in ((3, 5, 3), (2, 2, 3), (2, 1, 2), (1, 3, 1)):
            video = torch.randn(samples, 4, frames, side, side).double()
            compare(space["MyDiT"]().double(), mesh, video, torch.rand(samples, frames).double())

    assert counter.calls["switch", "backward"]
    checkpointed(space["MyDiT"], mesh)
    for shape in ((1, 4, 5, 3, 3), (2, 4, 1, 2, 5), (2, 4, 3, 1, 1)):
        compare(
            draw_weights(space["Latte"]().double()),
            mesh,
            torch.randn(shape).double(),
            torch.rand(shape[0]).double(),
        )


def checkpointed(model_class: type, mesh: SequenceMesh) -> None:
    """Two batches of different shape before one backward, each recomputed as what it was."""

    class Recomputed(model_class):
        def forward(self, video: torch.Tensor, frame_scale: torch.Tensor) -> torch.Tensor:
            x = self.embed(video.flatten(3).permute(0, 2, 3, 1).flatten(1, 2))
            for block in self.blocks:
                x = checkpoint(
                    block, x, video.shape[2], frame_scale=frame_scale, use_reentrant=False
                )
            return self.head(x)

    torch.manual_seed(0)
    bare = Recomputed().double()
    parallel = Recomputed().double()
    parallel.load_state_dict(bare.state_dict())
    parallelize(parallel, mesh)
    batches = [
        (torch.randn(1, 4, T, 3, S).double(), torch.rand(1, T).double())
        for T, S in [(4, 3), (6, 5), (3, 4)]
    ]
    for model in (bare, parallel):
        sum(model(*batch).square().mean() for batch in batches).backward()
    for ours, theirs in zip(parallel.parameters(), bare.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad / mesh.sp_size, theirs.grad, rtol=1e-9, atol=1e-11)


def recomputed() -> None:
    """Once a backward pass has shown that a module is recomputed, what it receives is kept."""
    mesh = SequenceMesh(dist.get_world_size())
    register_plan(Branches, PLAN)
    x = torch.randn(1, 5, 7, 6).double()
    for options, first, later in [
        ({}, 4, 0),
        (dict(recompute_communication=True), 4, 4),
    ]:
        torch.manual_seed(2)
        model = parallelize(Branches().double(), mesh, **options)
        gradients = []
        for expected in (first, later, later):
            model.zero_grad()
            with CommLedger() as counter:
                loss = model(x).square().sum()
                loss.backward(retain_graph=True)
            assert counter.calls["branch", "forward"] == 4
            assert counter.calls["branch", "recompute"] == expected, (options, counter.calls)
            gradients.append([p.grad.clone() for p in model.parameters()])

        # What was kept is used up, so a second pass through the same graph receives it again.
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        for others in gradients[1:]:
            for one, other in zip(gradients[0], others, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class InPlace(Attention):
    """Changes its argument. Under a dispatch mode it could not be compiled."""

    modes: set[bool] = set()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.modes.add(is_in_torch_dispatch_mode())
        return super().forward(x.mul_(0.5), mask)


class InPlaceBranches(Branches):
    """Each branch, which normalizes a copy of the stream, is checkpointed, or not."""

    is_checkpointed = True

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.spatial = nn.ModuleList(InPlace(width, "s") for _ in range(2))
        self.temporal = nn.ModuleList(InPlace(width, "t") for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for pair in zip(self.spatial, self.temporal, strict=True):
            for attention in pair:
                branch = partial(self._branch, attention)
                recomputed = partial(checkpoint, branch, use_reentrant=False)
                x = x + (recomputed if self.is_checkpointed else branch)(x)
        return self.head(x)

    def _branch(self, attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return attention(nn.functional.layer_norm(x, x.shape[-1:])).mul_(2.0)


def worked_in_place() -> None:
    """Modules may change what they receive, also where it is kept, as with one sample."""
    mesh = SequenceMesh(dist.get_world_size())
    register_plan(InPlaceBranches, PLAN)
    for batch_size in (1, 2):
        x = torch.randn(batch_size, 5, 7, 6).double()
        torch.manual_seed(3)
        bare = InPlaceBranches().double()
        model = parallelize(copy.deepcopy(bare), mesh)
        for step in range(3):
            for one in (bare, model):
                one.zero_grad()
                with CommLedger() as counter:
                    one(x).square().sum().backward()
            assert counter.calls["branch", "recompute"] == (0 if step else 4)
            for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
                dist.all_reduce(ours.grad)
                torch.testing.assert_close(ours.grad / mesh.sp_size, theirs.grad)
    assert InPlace.modes == {False}


def refused_plans() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    x = torch.randn(1, 4, 3, 6)
    register_plan(Branches, PLAN)
    with pytest.raises(ValueError, match=r"bypassed 4 modules of its ShardPlan \(spatial.0"):
        parallelize(Branches(called="class"), mesh)(x)
    with pytest.raises(ValueError, match="a forward that did not call 'head'"):
        parallelize(Branches(called="no head"), mesh)(x)
    with pytest.raises(ValueError, match=r"got 'mask' of shape \(1, 4, 4\); expected axes b t s"):
        parallelize(Branches(), mesh)(x, torch.ones(1, 4, 4))

    with pytest.raises(ValueError, match="copy before parallelize"):
        copy.deepcopy(parallelize(Branches(), mesh).spatial[0])
    register_plan(Stream, STREAM_PLAN)
    for model, options, message in [
        (Branches(), dict(strategy="ulysses"), "queries, keys and values inside of modules"),
        (Branches(), dict(overlap_backward=True), "cannot pass through code between modules"),
        (Stream(), dict(overlap_chunks=2), "cannot pass through code between modules"),
    ]:
        with pytest.raises(ValueError, match=f"got .*ShardPlan .*expected .*{message}.*; "):
            parallelize(model, mesh, **options)
        assert_bare(model)

    wrong = replace(PLAN, spatial=PLAN.temporal, temporal=PLAN.spatial)
    register_plan(Branches, wrong)
    with pytest.raises(ValueError, match="got another result under sequence parallelism"):
        parallelize(Branches(), mesh, verify=True)(x)

    model = Branches()
    model.temporal[1] = model.temporal[0]
    register_plan(Branches, PLAN)
    with pytest.raises(ValueError, match=r"got 'temporal.0' twice in one forward"):
        parallelize(model, mesh)(x)

    for change, message in [
        (dict(enter="entry"), "got 'entry' as a hook point, which matches no module"),
        (dict(temporal=("temporal.*", "nothing.*")), r"got 'nothing.\*' as a hook point"),
        (dict(enter="spatial.*"), "which matches 2 modules; expected one"),
        (dict(temporal=("spatial.0",)), "got 'spatial.0' as spatial and temporal"),
    ]:
        register_plan(Branches, replace(PLAN, **change))
        model = Branches()
        with pytest.raises(ValueError, match=message):
            parallelize(model, mesh)
        assert_bare(model)

    register_plan(Branches, replace(PLAN, placement="stream" if mesh.sp_rank else "branch"))
    with pytest.raises(ValueError, match="got different plan on .*: placement is 'branch' on "):
        parallelize(Branches(), mesh)(x)

    register_plan(Branches, PLAN)
    model = parallelize(Branches(), mesh, verify=True)
    unwrap(model)(x)  # without what would verify
    model = parallelize(model, mesh, verify=True)
    with torch.inference_mode():
        model(x)


def in_turn(*functions) -> None:
    for function in functions:
        function()


PLANNED = (planned_models, recomputed, worked_in_place, refused_plans)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_without_points_gives_the_one_process_result(num_ranks: int) -> None:
    run_ranks(num_ranks, in_turn, *PLANNED)


def test_bad_plans_are_refused() -> None:
    for field, reported in [
        (dict(tokens="b c t s"), "got tokens 'b c t s'; expected one of"),
        (dict(placement="around"), "got placement 'around'; expected 'stream' or 'branch'"),
        (dict(arguments={"mask": "b x"}), "got axes 'b x' for argument 'mask'"),
        (dict(tokens="rows"), "expected modules of all three with tokens 'rows'"),
        (dict(switch=("turn",)), "and none otherwise; correct the ShardPlan"),
    ]:
        with pytest.raises(ValueError) as error:
            ShardPlan(**{**dict(enter="a", spatial=(), temporal=(), leave="b"), **field})
        assert reported in str(error.value)


def test_hook_points_are_a_plan_as_well() -> None:
    """A class without ``sharding_points`` takes part by a plan that names its hook points."""

    class Renamed(STDiT3):
        sharding_points = None

    config = dict(hidden_size=8, num_heads=2, depth=1, caption_channels=5, model_max_length=4)
    torch.manual_seed(0)
    model = Renamed(STDiT3.Config(**config))
    with pytest.raises(ValueError, match="got a model of class Renamed with sharding_points None"):
        parallelize(model, SequenceMesh(1))

    # None is for models without temporal blocks alone.
    for absent in ("spatial", "temporal"):
        model.sharding_points = {**STDiT3.sharding_points, absent: None}
        with pytest.raises(ValueError, match=f"of class Renamed .*'{absent}': None.*; expected"):
            parallelize(model, SequenceMesh(1))

    register_plan(Renamed, plan_of(STDiT3(model.config)))
    inputs = dict(x=torch.randn(1, 4, 2, 4, 4), timestep=torch.ones(1), y=torch.randn(1, 1, 4, 5))
    whole = model(**inputs)
    parallelize(model, SequenceMesh(1))
    shard = model(**inputs, output="shards")
    assert torch.equal(shard.rows.slice(whole), shard.tensor)
