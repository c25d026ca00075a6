"""``collective_timeout`` is the timeout of every process group of a run, whoever makes it."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.distributed_c10d import _get_default_store

from opensora_sp.parallel import shutdown_process_group
from opensora_sp.runtime.collective_recorder import CollectiveRecorder
from opensora_sp.runtime.timeouts import backend_timeout

SECONDS = 2.0


def groups_that_time_out() -> dict[str, str]:
    """What rank 0 gets where rank 1 joins no collective of a group."""
    from colossalai.cluster import ProcessGroupMesh

    recorder, store = CollectiveRecorder(timedelta(seconds=SECONDS)), _get_default_store()
    recorder.start()
    groups = {
        "torch": dist.new_group([0, 1]),
        "saver": dist.new_group(backend="gloo"),
        "ColossalAI": ProcessGroupMesh(2, 1).get_group_along_axis(0),
    }

    errors = {}
    if dist.get_rank():
        store.wait(["done"], timedelta(seconds=120))
    else:
        errors = errors_of_waiting_alone(groups)
        store.set("done", "")

    recorder.stop()
    del groups
    shutdown_process_group(drain=False)
    return errors


def errors_of_waiting_alone(groups: dict[str, dist.ProcessGroup]) -> dict[str, str]:
    """By group the error of a collective; all wait at the same time."""
    start, errors = time.monotonic(), {}
    works = {
        name: dist.all_reduce(torch.ones(3), group=group, async_op=True)
        for name, group in groups.items()
    }
    for name, work in works.items():
        with pytest.raises(RuntimeError) as error:
            work.wait()
        assert SECONDS <= time.monotonic() - start < 60
        errors[name] = str(error.value)
    return errors


def test_groups_that_are_made_under_the_watchdog_have_its_timeout() -> None:
    errors, _ = run_ranks(2, groups_that_time_out)
    assert set(errors) == {"torch", "saver", "ColossalAI"}
    for error in errors.values():
        assert "Timed out waiting 2000ms" in error


def launched() -> timedelta:
    from opensora_sp.plugin import launch

    shutdown_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    launch(0, timeout=backend_timeout(17.0))
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_launch_sets_the_timeout_of_all_ranks() -> None:
    assert run_ranks(1, launched) == [timedelta(seconds=77)]
