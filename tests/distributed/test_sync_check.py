"""Ranks that no longer hold the same numbers: found, and named with the tensor and the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plugin_cases import STEPS, make_batch, make_model
from ranks import run_ranks
from torch import Tensor

from opensora_sp.diffusion import velocity_loss
from opensora_sp.parallel import SequenceMesh
from opensora_sp.training import sync_check
from opensora_sp.training.sync_check import SyncCheck

INTEGERS = {2: torch.int16, 4: torch.int32}
WEIGHT, LAST = "temporal_blocks.1.mlp.fc1.weight", "final_layer.linear.bias"
FROZEN, BUFFER = "t_block.1.weight", "y_embedder.y_embedding"


def synchronous(dtype: torch.dtype) -> dict[str, str]:
    """Two replicas of two ranks: a toy model, whose parameters or batches are made to differ."""

    mesh, found = SequenceMesh(2), {}
    batch = {
        "x_t": torch.full((3, 5), float(mesh.dp_rank)),
        "mask": torch.ones(7, dtype=torch.bool),
        "fps": None,
    }

    def check(
        name: str, batches: list[dict[str, Any]], change: tuple[str, int] | None = None
    ) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)).to(dtype)
        if change is not None and mesh.rank == change[1]:
            model.get_parameter(change[0]).data[-1] = 7.0
        watch = SyncCheck(model, mesh, every=4)
        for step in range(4):
            for one in batches:
                watch.see(step, one)
            try:
                watch.compare(step)
            except ValueError as error:
                found[name] = str(error)

    check("same", [batch, batch])
    assert "same" not in found
    check("parameter", [batch], ("1.weight", 3))
    check("peer", [batch | ({"mask": torch.zeros(7, dtype=torch.bool)} if mesh.rank == 2 else {})])
    check("replica", [batch | {"x_t": torch.zeros(3, 5)}])
    check("idle replica", [batch] if mesh.dp_rank == 0 else [])

    # As of a faulty device: a digest that is wrong once.
    digest = sync_check.digest
    wrong = [1] if mesh.rank == 2 else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sync_check, "digest", lambda *args: digest(*args) + (wrong.pop() if wrong else 0)
        )
        check("once", [])
    return found


def all_synchronous() -> list[dict[str, str]]:
    return [synchronous(dtype) for dtype in (torch.float32, torch.bfloat16)]


def test_parameters_are_compared_everywhere_and_batches_in_groups_and_across_replicas() -> None:
    for of_rank in run_ranks(4, all_synchronous):
        for found in of_rank:
            assert set(found) == {"parameter", "peer", "replica", "once"}
            assert (
                "got another weight '0.weight' on ranks [2] than on ranks [0, 1, 3]"
                in found["once"]
            )
            assert (
                "got another weight '1.weight' on ranks [3] than on ranks [0, 1, 2]"
                in found["parameter"]
            )
            assert (
                "got another batch tensor 'mask' on ranks [3] than on ranks [2], in step 4"
                in found["peer"]
            )
            assert (
                "got the same batch on replicas that begin with ranks [0, 2], in step 4"
                in found["replica"]
            )


def trained(precision: str) -> tuple[torch.nn.Module, SyncCheck]:
    """A model with frozen weights after two steps, and a check of every step."""
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    model = make_model()
    model.get_parameter(FROZEN).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plugin = SequenceParallelPlugin(1, precision=precision)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    for step in range(STEPS):
        batch = make_batch(step)
        loss = velocity_loss(boosted(**batch), -batch["x"]).mean()
        optimizer.backward(loss)
        optimizer.step_if_finite(loss)
    return model, SyncCheck(model, plugin.mesh, 1, optimizer.shards)


@contextmanager
def flipped(tensor: Tensor, index: int, bit: int, rank: int) -> Iterator[None]:
    """Inside, one bit of one element differs on one rank."""
    flat = tensor.data.view(-1)
    words = flat.view(INTEGERS[flat.element_size()])
    if dist.get_rank() == rank:
        words[index] ^= 1 << bit
    yield
    if dist.get_rank() == rank:
        words[index] ^= 1 << bit


def found(check: SyncCheck) -> str:
    try:
        check.compare(4)
        return "nothing"
    except ValueError as error:
        return str(error)


def all_flips(precision: str) -> dict[tuple[str, int], str]:
    """What the check finds for each kind of tensor, and each rank whose bit is flipped."""
    model, check = trained(precision)
    shards, world = check.shards, dist.get_world_size()
    assert shards is not None and WEIGHT in shards.working and FROZEN not in shards.working
    flips = {
        "part of rank 0": (shards.working[WEIGHT], 0, 0),
        "part of the last rank": (shards.working[WEIGHT], -1, 3),
        "last weight": (shards.working[LAST], 1, 14),
        "frozen": (model.get_parameter(FROZEN), 7, 1),
        "buffer": (model.get_buffer(BUFFER), 29, 9),
        # Of fp32 numbers, bf16 keeps the upper half.
        "master": (shards.master_weights[WEIGHT], 5, 20),
    }

    # It changes nothing that the next step depends on.
    state = [p.data.clone() for p in (*model.parameters(), *shards.master_weights.values())]
    generator = torch.get_rng_state()
    results = {("none", 0): found(check)}
    now = (*model.parameters(), *shards.master_weights.values())
    assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True))
    assert torch.equal(generator, torch.get_rng_state())

    for kind, flip in flips.items():
        for rank in range(world):
            with flipped(*flip, rank):
                results[kind, rank] = found(check)

    frozen = model.get_parameter(FROZEN).data.view(-1)
    if dist.get_rank() == 1:
        frozen[:2] = frozen[:2].flip(0).clone()
    results["swapped", 1] = found(check)
    return results


NAMES = {"last weight": LAST, "frozen": FROZEN, "buffer": BUFFER, "swapped": FROZEN}


@pytest.mark.parametrize(("world", "precision"), [(3, "bf16"), (2, "fp32")])
def test_a_flipped_bit_is_named_with_the_tensor_and_the_rank(world: int, precision: str) -> None:
    of_ranks = run_ranks(world, all_flips, precision)
    assert all(results == of_ranks[0] for results in of_ranks)

    results: dict[tuple[str, int], str] = of_ranks[0]
    assert results.pop(("none", 0)) == "nothing" and len(results) == 6 * world + 1
    for (kind, rank), message in results.items():
        name = NAMES.get(kind, WEIGHT)
        where = f"got another weight {name!r} on ranks [{rank}] than on ranks"
        if kind == "master":
            where = f"got a part of the working weight {name!r} on ranks [{rank}] that is not"
        elif world == 2:
            where = f"got another weight {name!r} on ranks [1] than on ranks [0]"
        assert message.startswith(where), (kind, rank, message)
        assert "in step 5; expected" in message and "--resume PATH" in message
