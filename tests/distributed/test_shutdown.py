"""Process groups end, whatever their threads still hold; ``make test-shutdown`` ends 2,000."""

from __future__ import annotations

import faulthandler
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import ROOT
from torch.distributed.distributed_c10d import _get_default_store

from opensora_sp.parallel import closing_process_group, drain_process_group, shutdown_process_group


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
@pytest.mark.parametrize(("ranks", "sample"), [(1, 100), (2, 60)])
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


@pytest.mark.parametrize("folder", ["opensora_sp", "scripts", "benchmarks", "docs", "tests"])
def test_nobody_else_destroys_a_process_group(folder: str) -> None:
    here = {ROOT / "opensora_sp/parallel/mesh.py", Path(__file__)}
    files = [
        path
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and path not in here
    ]
    assert files
    call = re.compile(r"^\s*(dist|torch\.distributed)\.destroy_process_group\(", flags=re.MULTILINE)
    assert [path for path in files if call.search(path.read_text())] == []
