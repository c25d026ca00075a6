"""Process groups end, whatever their threads still hold; ``make test-shutdown`` ends 2,000."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import become_rank, free_port, run_ranks, torchrun_environment, warm_context
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from opensora_sp.parallel import (
    SequenceMesh,
    ShardPlan,
    closing_process_group,
    drain_process_group,
    parallelize,
    register_plan,
    shutdown,
    shutdown_process_group,
)


def use_and_end(store: dist.Store, rank: int, ranks: int, number: int) -> None:
    """One process group with a group made from it, and works of every kind a run leaves behind."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    part = dist.new_group(list(range(ranks)))

    for group in (None, part):
        works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(4)]
        if number % 2:
            for work in works:
                work.wait()
        del works

    # Some object keeps a group beyond the end of its world in every third case.
    if number % 3:
        del group, part
    shutdown_process_group()


sample_or_grid = pytest.mark.parametrize(
    "grid",
    [pytest.param(False, id="sample"), pytest.param(True, id="grid", marks=pytest.mark.grid)],
)

SECONDS = 30.0  # for one group


def many_groups(count: int) -> None:
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    shutdown_process_group()
    for number in range(count):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        use_and_end(dist.PrefixStore(f"{number}", store), rank, ranks, number)
    faulthandler.cancel_dump_traceback_later()


@sample_or_grid
@pytest.mark.parametrize(("ranks", "sample"), [(1, 30), (2, 20)])
def test_groups_end(ranks: int, sample: int, grid: bool) -> None:
    run_ranks(ranks, many_groups, 2000 if grid else sample, timeout=1200)


def ends_of_blocks() -> list[object]:
    """What a late rank, an error and no process group at all do to the end."""
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    dist.barrier()
    start = time.monotonic()
    if rank:
        time.sleep(2.0)
    shutdown_process_group()
    waited = time.monotonic() - start

    shutdown_process_group()
    drain_process_group()
    with closing_process_group():
        pass

    dist.init_process_group(
        "gloo", store=dist.PrefixStore("error", store), rank=rank, world_size=ranks
    )
    raised, start = None, time.monotonic()
    if rank:
        time.sleep(10.0)  # rank 0 fails before, and does not wait
    try:
        with closing_process_group():
            raise KeyError("planted")
    except KeyError as error:
        raised = str(error)
    return [waited, raised, time.monotonic() - start, dist.is_initialized()]


@pytest.mark.slow
def test_the_end_waits_for_all_ranks_but_not_after_an_error() -> None:
    first, second = run_ranks(2, ends_of_blocks)
    assert first[0] >= 2.0 and second[0] >= 2.0
    assert first[1] == second[1] == "'planted'" and first[2] < 9.0 < second[2]
    assert not first[3] and not second[3]


class Layer(nn.Linear):
    """Raises on rank 1, in its forward or backward."""

    planted_in: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if dist.get_rank() == 1 and self.planted_in == "forward":
            raise ValueError("planted")
        if dist.get_rank() == 1 and self.planted_in == "backward":
            out.register_hook(lambda grad: [][1])
        return out


def failing_loop(rank: int, port: int, planted_in: str, log: Path) -> None:
    """A custom training loop, of which an error ends this process as it ends Python."""
    become_rank(rank, 3, **torchrun_environment(port))
    sys.stderr = log.open("w")
    try:
        dist.init_process_group("gloo")
        layers = [Layer(4, 4) for _ in range(4)]
        for layer in layers:
            layer.planted_in = planted_in if layer is layers[2] else ""
        plan = ShardPlan(enter="0", spatial=("0", "2"), temporal=("1",), leave="3")
        register_plan(nn.Sequential, plan)
        model = parallelize(nn.Sequential(*layers), SequenceMesh(3))
        model(torch.randn(1, 3, 3, 4)).sum().backward()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(1)


@pytest.mark.parametrize("planted_in", ["forward", "backward"])
def test_a_rank_that_raises_gives_its_peers_the_reason(planted_in: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [tmp_path / f"rank {rank}" for rank in range(3)]
    processes = []
    for rank, log in enumerate(logs):
        arguments = rank, store.port, planted_in, log
        process = warm_context().Process(target=failing_loop, args=arguments, daemon=True)
        process.start()
        processes.append(process)
    for process in processes:
        process.join(60)
        assert process.exitcode == 1

    error = "ValueError: planted" if planted_in == "forward" else "IndexError: list index"
    for rank, log in enumerate(logs):
        *_, last = log.read_text().splitlines()
        expected = error if rank == 1 else f"first, rank 1 failed: {error}"
        assert last.removeprefix(f"[rank{rank}]: ").startswith(expected), log.read_text()


def fail_with_a_stopped_host(rank: int, port: int) -> None:
    """Rank 0 hosts the store, and is stopped when rank 1 leaves its reason there."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)

    time.sleep(0.5)
    shutdown.STORE_TIMEOUT = 1.0
    shutdown.report_failure(ValueError("planted"))
    os._exit(7)


def test_a_stopped_host_of_the_store_keeps_no_failed_rank() -> None:
    port = free_port()
    context = warm_context()
    processes = [
        context.Process(target=fail_with_a_stopped_host, args=(rank, port), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    stopped, failed = processes
    failed.join(30)
    stopped.kill()
    assert failed.exitcode == 7
