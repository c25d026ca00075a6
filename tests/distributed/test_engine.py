"""The engine from its user's side: overhead without other ranks, counts, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from operator_counts import operators
from parity_cases import DEPTH, FULL, PLAIN, Case, make_inputs, make_model
from ranks import run_ranks
from tiny_models import TINY
from torch.utils.checkpoint import set_checkpoint_early_stop

from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, Options, SequenceMesh, collectives, parallelize, unwrap
from opensora_sp.parallel.layout import (
    SPATIAL_ROWS,
    TEMPORAL_ROWS,
    BatchAxes,
    ExchangePlan,
    plan_exchange,
)
from opensora_sp.planner.live_peak import LivePeak

pytestmark = pytest.mark.core


@pytest.mark.parametrize("case", [PLAIN[0], replace(FULL, size=(2, 5, 7, 9), checkpoint=True)])
def test_one_rank_runs_the_operators_of_the_bare_model(case: Case) -> None:
    bare = operators(make_model(case), case)
    mesh = SequenceMesh(1)
    with CommLedger() as counter:
        for options in (
            {},
            dict(overlap_chunks=4, overlap_backward=True),
            dict(strategy="ulysses"),
        ):
            assert operators(parallelize(make_model(case), mesh, **options), case) == bare
    assert not counter.calls


def refused_everywhere() -> list[str]:
    """The same error on every rank, and the model of use afterwards."""
    mesh = SequenceMesh(dist.get_world_size())
    case = Case((1, 5, 7, 9))
    model, rank = parallelize(make_model(case), mesh), mesh.sp_rank
    model(**make_inputs(case))  # all ranks have seen this shape
    reported = []
    # Rank 0 has seen this shape.
    other = make_inputs(Case((1, 5, 7, 9) if rank == 0 else (1, 4, 7, 9)))
    mixed = {**make_inputs(case), "output": "shards" if rank == 0 else "full"}
    longer = {**make_inputs(case), "y": torch.randn(1, 1, 6 - rank, 5, dtype=torch.float64)}
    listed = {**make_inputs(case), "fps": [torch.ones(1 + rank)]}  # tensors in containers count
    encoded = {**make_inputs(case), "y": model.encode_text(torch.randn(1 + rank, 1, 6, 5).double())}
    x = make_inputs(case)["x"]
    typed = {**make_inputs(case), "x": x.float() if rank else x}

    for inputs in (other, mixed, longer, listed, encoded, typed):
        with (
            CommLedger() as counter,
            pytest.raises(ValueError, match="got different inputs on the ranks") as error,
        ):
            model(**inputs)
        assert set(counter.calls) == {("check", "forward")}
        reported.append(str(error.value))

    model(**make_inputs(case))
    shared_otherwise = parallelize(make_model(case), mesh, strategy="ulysses" if rank else "switch")
    with pytest.raises(ValueError, match="got different options .*: strategy is 'switch' on rank"):
        shared_otherwise(**make_inputs(case))

    return reported + other_modes(model, case, rank)


def other_modes(model: torch.nn.Module, case: Case, rank: int) -> list[str]:
    """Errors of ranks that compute in other modes."""
    reported = []
    for name, value in (("train", rank == 0), ("set_grad_checkpoint", rank == 0)):
        getattr(model, name)(value)
        with pytest.raises(ValueError, match="got different modes on the ranks") as error:
            model(**make_inputs(case))
        reported.append(str(error.value))
        getattr(model, name)(name == "train")
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(ValueError, match="got different modes") as error,
    ):
        model(**make_inputs(case))
    model(**make_inputs(case))
    return [*reported, str(error.value)]


def mixed_layouts() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    model = parallelize(make_model(PLAIN[0]), mesh)
    double, single = (
        model(**make_inputs(Case(size)), output="shards") for size in [(2, 5, 7, 9), (1, 5, 7, 9)]
    )

    with pytest.raises(ValueError, match=r"expected \[2, channels, 5, 7, 9\]"):
        double.rows.slice(make_inputs(PLAIN[0])["x"])

    block, rows = model.spatial_blocks[0], single.rows.transposed()
    with pytest.raises(ValueError, match=r"got tokens \(3, 7, 12\) as spatial rows \[0, 5\) of 5"):
        block.attn(torch.zeros(3, 7, 12, dtype=torch.float64), rows)


def held_after_backward() -> None:
    """After a backward pass overlap holds no more than plain switches; no chunk is empty.

    Nor where recomputation runs to its end, as in ``checkpoint(debug=True)``: it starts switches.
    """
    mesh, case = SequenceMesh(dist.get_world_size()), Case((1, 7, 16, 32), checkpoint=True)
    chunked = dict(overlap_chunks=4, overlap_backward=True)
    ways = [({}, True), (dict(overlap_backward=True), True), (chunked, True), (chunked, False)]
    live, calls = [], []
    for options, stops_early in ways:
        model = parallelize(make_model(case), mesh, **options)
        inputs = make_inputs(case)
        with torch.no_grad():
            model(**inputs)  # plans are made once, and stay
        with CommLedger() as counter, LivePeak() as seen, set_checkpoint_early_stop(stops_early):
            loss = model(**inputs).sum()
            loss.backward()
            for leaf in (*model.parameters(), inputs["x"], inputs["y"]):
                leaf.grad = None
        live.append(seen.live)
        calls.append(counter.calls["switch", "forward"])

    assert len(set(live)) == 1, live
    switches = 2 * DEPTH - 1
    to_temporal = DEPTH  # of 3 or 4 spatial rows on a rank, which are three chunks, not four
    chunks = 3 * to_temporal + 4 * (switches - to_temporal)
    assert calls == [switches, switches, chunks, chunks], calls


def second_derivatives() -> None:
    """The reverse of an exchange can be differentiated; what cannot be twice raises an error."""
    plan = plan_exchange(
        BatchAxes(1, 3, 4),
        SPATIAL_ROWS,
        TEMPORAL_ROWS,
        2,
        dist.get_rank(),
        torch.device("cpu"),
    )
    group = dist.group.WORLD
    x = torch.randn(len(plan.pack), 2, dtype=torch.float64, requires_grad=True)
    y = collectives.exchange(x, plan, group)
    weights = torch.randn(y.shape, dtype=torch.float64)
    (first,) = torch.autograd.grad((y.pow(3) * weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    back = ExchangePlan(plan.unpack, plan.pack, plan.recv_splits, plan.send_splits)
    wanted = collectives.exchange(6 * y.detach() * weights, back, group)

    torch.testing.assert_close(second, wanted)
    gathered = collectives.gather_rows(x, [4, 8], group)  # tokens of 1 and of 2 frames
    (first,) = torch.autograd.grad(gathered.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def verified() -> None:
    """``verify`` takes all that the model takes: expanded gradients, text encoded in any mode."""
    mesh, inputs = SequenceMesh(dist.get_world_size()), make_inputs(PLAIN[0])
    for model in (windows_with_unused_conditions(), make_model(PLAIN[0])):
        parallelize(model, mesh, verify=True)(**inputs).sum().backward()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model = parallelize(make_model(PLAIN[0]), mesh, verify=True)
        with mode():
            assert model(**inputs | {"y": model.encode_text(inputs["y"])}).isfinite().all()


def windows_with_unused_conditions() -> torch.nn.Module:
    """Embedders of conditions that a batch lacks get zeros: one number, expanded to the weight."""
    torch.manual_seed(0)
    settings = dict(TINY, hidden_size=12, depth=1, num_heads=2)
    model = build_model("STDiT3", **settings, kernel_size=(2, 2, -1), use_cond=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def in_turn(*functions) -> list:
    return [function() for function in functions]


def test_errors_and_counts_on_ranks() -> None:
    results = run_ranks(
        2,
        in_turn,
        refused_everywhere,
        mixed_layouts,
        held_after_backward,
        second_derivatives,
        verified,
    )
    (reported, *_), (reported_elsewhere, *_) = results

    assert reported == reported_elsewhere
    named = ["x is [1, 2, 5", "output is 'shards'", "y is [1, 1, 6", "fps[0] is", "y is Text of 1"]
    named += ["x is [1, 2, 5", "train() or eval() is", "gradient checkpointing is", "gradient mode"]
    for error, differing in zip(reported, named, strict=True):
        assert f": {differing}" in error


def test_bad_options_are_refused() -> None:
    for options, reported in [
        (dict(strategy="ring"), "got strategy 'ring'; expected one of"),
        (dict(overlap_chunks=0), "got overlap_chunks 0; expected at least 1"),
        (dict(overlap_backward=True, strategy="ulysses"), "whose exchanges lie between blocks"),
    ]:
        with pytest.raises(ValueError) as error:
            Options(**options)
        assert reported in str(error.value)

        model = make_model(PLAIN[0])
        with pytest.raises(ValueError, match="; "):
            parallelize(model, SequenceMesh(1), **options)
        assert unwrap(model) is model and not model._forward_pre_hooks

    with pytest.raises(ValueError, match=r"got sp_size 4 with 1 processes; expected an sp_size"):
        SequenceMesh(4)
