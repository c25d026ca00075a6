"""A degree for each micro-batch: steps over groups of any cut of the world equal one process."""

from __future__ import annotations

import logging
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operator_counts import operators
from parity_cases import PLAIN, make_inputs, make_model
from random_cuts import BASE, draw_step, mean_gradients, one_process_step, run_step
from ranks import run_ranks
from worlds import in_worlds

from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize
from opensora_sp.parallel.rank_groups import RankGroup
from opensora_sp.planner.seconds import ModelFlops
from opensora_sp.runtime.collective_recorder import CollectiveRecorder
from opensora_sp.training.step_log import Meter


def ranks_per_node(seed: int) -> str:
    """Nodes of three ranks divide the world in other places than one node does."""
    return "3" if seed % 4 < 2 else "8"


def compare_step(seed: int, output: str) -> float:
    """The largest relative difference of outputs and gradients."""
    os.environ["LOCAL_WORLD_SIZE"] = ranks_per_node(seed)
    mesh = SequenceMesh("auto")
    step = draw_step(mesh.family, seed, output)
    model, bare = parallelize(make_model(BASE), mesh), make_model(BASE)
    found = run_step(model, mesh, step)
    wanted = one_process_step(bare, step)

    pairs = []
    for name, gradient in mean_gradients(model).items():
        theirs = bare.get_parameter(name).grad
        pairs.append((gradient, torch.zeros_like(gradient) if theirs is None else theirs))
    floor = 1e-3 * max(theirs.abs().max().item() for _, theirs in pairs)

    for one in step:
        for index, theirs in enumerate(wanted[one.number]):
            # A rank's part of the gradient of an input; the output is whole on each.
            ours = found[one.number][index] if one.number in found else torch.zeros_like(theirs)
            whole = ours.detach().clone()
            dist.all_reduce(whole)
            pairs.append((whole / (mesh.world_size if index else one.group.size), theirs))

    scaled = [(a - b).abs().max().item() / max(b.abs().max().item(), floor) for a, b in pairs]
    return max(scaled)


def compare_worlds(sizes: list[int], seeds: range) -> list[tuple[float, ...]]:
    cases = []
    for size in sizes:
        cases += [(size, (seed, ("shards", "full")[seed % 2])) for seed in seeds]
    return in_worlds(compare_step, cases)


@pytest.mark.parametrize(
    ("sizes", "seeds"),
    [([2, 3], range(2)), pytest.param([4, 5, 6, 7, 8], range(4), marks=pytest.mark.slow)],
)
def test_a_step_over_any_cut_equals_one_process(sizes: list[int], seeds: range) -> None:
    for of_rank in run_ranks(max(sizes), compare_worlds, sizes, seeds):
        assert all(found is None or found < 1e-9 for found in of_rank), of_rank
        assert len(of_rank) == len(sizes) * len(seeds)


def groups_of_a_mesh() -> dict[str, Any]:
    """What a rank of three has: its groups, its operators alone, and refusals."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = SequenceMesh("auto")
    found: dict[str, Any] = {"start": mesh.group, "repr": repr(mesh)}
    found["own"] = [(one.ranks, one.sp_rank, one.spans_nodes) for one in mesh.own]
    for one in mesh.own:
        members = None
        if one.sp_group is not None:
            members = dist.get_process_group_ranks(one.sp_group)
            assert one.host_group is one.sp_group
        assert members == (list(one.ranks.ranks) if one.sp_size > 1 else None)

    model, alone = parallelize(make_model(PLAIN[0]), mesh), RankGroup(mesh.rank, mesh.rank + 1)
    bare = operators(make_model(PLAIN[0]), PLAIN[0])
    with mesh.using(alone), CommLedger() as counter:
        found["same operators"] = operators(model, PLAIN[0]) == bare
    found["sent alone"] = dict(counter.calls)
    assert mesh.group == (0, 3)

    recorder = CollectiveRecorder(timedelta(seconds=60))
    recorder.start()
    pair = mesh.own[1].sp_group
    if pair is not None:
        dist.all_reduce(torch.ones(2), group=pair)
        found["recorded"] = str(recorder.pending()[0])
    recorder.stop()

    with pytest.raises(ValueError) as refused, mesh.using(RankGroup(1, 3)):
        pass
    found["refused"] = str(refused.value)
    return found


def test_a_rank_has_nested_groups_and_alone_runs_the_bare_model() -> None:
    first, _, last = run_ranks(3, groups_of_a_mesh)

    assert first["start"] == RankGroup(0, 3)
    assert first["own"] == [((0, 3), 0, True), ((0, 2), 0, False), ((0, 1), 0, False)]
    assert last["own"] == [((0, 3), 2, True), ((2, 3), 0, False)]
    assert "number 1 of process group sp_size 2 (ranks 0, 1)" in first["recorded"]
    assert first["same operators"] and not first["sent alone"]
    assert last["same operators"] and not last["sent alone"]
    assert last["refused"] == (
        "got ranks 1-2 as the group of a micro-batch on rank 2; expected one of its groups: "
        "ranks 0-2, rank 2; pass a group of mesh.family with this rank as a member"
    )
    assert first["repr"] == "SequenceMesh('auto', sp_sizes=[1, 2, 3], rank=0)"


def groups_of_two_meshes() -> list[float]:
    """Sums over the groups of a second mesh, where ranks have different numbers of groups."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    SequenceMesh("auto")
    sums = []
    for one in SequenceMesh("auto").own:
        if one.sp_group is not None:
            number = torch.ones(())
            dist.all_reduce(number, group=one.sp_group)
            sums.append(number.item())
    return sums


@pytest.mark.core
def test_a_process_may_have_several_meshes() -> None:
    # Four ranks on two nodes: of the group of three, two ranks have a pair as well.
    found = run_ranks(4, groups_of_two_meshes, timeout=60)
    assert found == [[4, 3, 2], [4, 3, 2], [4, 3], [4]]


def verified_groups() -> list[str]:
    """Messages of verification, over groups that some ranks enter before others do."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("opensora_sp.parallel.parity")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    mesh = SequenceMesh("auto")
    model = parallelize(make_model(PLAIN[0]), mesh, verify=True)
    for group in (RankGroup(0, 2), RankGroup(2, 3), RankGroup(0, 3), RankGroup(0, 2)):
        if mesh.rank in group:
            with mesh.using(group):
                model(**make_inputs(PLAIN[0]))
    return messages


def test_each_group_verifies_its_first_batch() -> None:
    of_ranks = run_ranks(3, verified_groups)

    # Two groups of ranks 0 and 1, and the world of rank 2, which is alone in its other group.
    assert [len(messages) for messages in of_ranks] == [2, 2, 1]
    assert all("with and without sequence parallelism" in one for one in of_ranks[0])


def differing_batches() -> str:
    """Rank 1 calls the model with other inputs than rank 0 in the smaller of their groups."""
    mesh = SequenceMesh("auto")
    model = parallelize(make_model(PLAIN[0]), mesh)
    model(**make_inputs(PLAIN[0]))
    if mesh.rank == 2:
        return ""
    with (
        mesh.using(RankGroup(0, 2)),
        pytest.raises(ValueError, match="got different inputs on the ranks") as refused,
    ):
        model(**make_inputs(PLAIN[mesh.rank]))
    return str(refused.value)


def test_inputs_are_compared_in_the_group_of_the_micro_batch() -> None:
    first, second, other = run_ranks(3, differing_batches)
    assert first == second and not other


def random_schedules(seeds: range) -> int:
    """Tiny exchanges in random groups, the largest first, by ranks that sleep at random."""
    mesh, done = SequenceMesh("auto"), 0
    own = {one.ranks: one for one in mesh.own}
    for seed in seeds:
        drawn = random.Random(seed).choices(mesh.family, k=3 * mesh.world_size)
        for group in sorted(drawn, key=lambda one: -one.size):
            if mesh.rank not in group or group.size == 1:
                continue
            time.sleep(random.Random(f"{seed} {mesh.rank} {done}").choice([0, 0, 0.002]))
            numbers = torch.tensor([float(mesh.rank)])
            dist.all_reduce(numbers, group=own[group].sp_group)
            assert numbers.item() == sum(group.ranks)
            done += 1
        dist.barrier()
    return done


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(5, range(3)), pytest.param(8, range(20), marks=pytest.mark.slow)]
)
def test_ranks_that_start_their_largest_groups_first_finish(world_size: int, seeds: range) -> None:
    assert min(run_ranks(world_size, random_schedules, seeds, timeout=120)) > 0


WORLD, PAIR = RankGroup(0, 3), RankGroup(0, 2)


def followed_by_checks() -> dict[str, Any]:
    """What else knows of groups, on three ranks: the meter and corrupt clips."""
    mesh = SequenceMesh("auto")
    return {
        "mfu": mfu(mesh),
        "corrupt": corrupt_error(mesh),
    }


def mfu(mesh: SequenceMesh) -> float:
    """Of one micro-batch in the world, one in the pair, and one on the last rank."""
    model: Any = make_model(PLAIN[0])
    meter = Meter(model, torch.device("cpu"), mesh=mesh, peak_tflops=1e-12)
    batch: Any = SimpleNamespace(
        x_t=torch.zeros(1, 2, 2, 4, 4), text_lengths=[3], inputs=dict(drop_caption=None)
    )
    for group in (WORLD, PAIR, RankGroup(2, 3)):
        if mesh.rank in group:
            with mesh.using(group):
                meter.count(batch)
    measured = meter.measure(waited=0.0, steps=1, seconds=1.0, left=0)["mfu"]
    return measured * 3 / ModelFlops.of(model).step((1, 2, 2, 4, 4), 3)


def corrupt_error(mesh: SequenceMesh) -> str:
    """Four clips of the world of which one was corrupt, two of the pair, one of the last rank."""
    rows: Any = [SimpleNamespace(path=Path("clip.mp4"))] * 7
    corrupt = CorruptSamples(rows, mesh, max_bad_fraction=0.0)
    for group, clips in ((WORLD, range(4)), (PAIR, range(4, 6)), (RankGroup(2, 3), [6])):
        if mesh.rank in group:
            with mesh.using(group):
                corrupt.count_used(clips)
                corrupt.count_substituted([0] if group == WORLD else [])
    with pytest.raises(ValueError, match="got 1 corrupt clips of 7 read"):
        corrupt.report(torch.device("cpu"))
    return str(corrupt.read)


def test_what_counts_and_measures_follows_the_group() -> None:
    first, _, last = run_ranks(3, followed_by_checks)
    assert first["mfu"] == last["mfu"] == pytest.approx(3)
    assert [first["corrupt"], last["corrupt"]] == ["6", "1"]
