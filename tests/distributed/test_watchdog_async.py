"""On a backend whose collectives return at once, the watchdog names what a rank did not join."""

from __future__ import annotations

import functools
import inspect
import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exits import recorded_exits
from logs import captured_lines
from polling import wait_until
from ranks import run_ranks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from opensora_sp.parallel import shutdown_process_group
from opensora_sp.runtime.collective_recorder import COLLECTIVES, CollectiveRecorder
from opensora_sp.runtime.rendezvous import join_rendezvous
from opensora_sp.runtime.watchdog import Watchdog

OPERATIONS = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allreduce"),
    *("alltoall_base", "barrier", "broadcast", "reduce"),
)


class Launched(dist.Work):
    """Waiting for it orders what follows on the device, and holds nobody up on the host."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class AsyncGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.backend, self.timeout = dist.ProcessGroupGloo(store, rank, size, timeout), timeout
        self.asynchronous = False  # the host waits for each collective until this is set
        self._launched: queue.Queue[Callable[[], Any]] = queue.Queue()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "asynchronous"

    def synchronize(self) -> None:
        self._launched.join()

    def _run(self) -> None:
        while True:
            collective = self._launched.get()
            collective()
            del collective
            self._launched.task_done()

    def _launch(self, name: str, *args: Any) -> Launched:
        self._launched.put(lambda: getattr(self.backend, name)(*args).wait())
        if not self.asynchronous:
            self.synchronize()
        return Launched()


def _launching(name: str) -> Callable[..., Launched]:
    def launch(self: AsyncGroup, *args: Any, opts: Any = None) -> Launched:
        return self._launch(name, *args, *([] if opts is None else [opts]))

    return launch


# Newer versions call a group by the second names; gloo has the first.
RENAMED = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
for _name in OPERATIONS:
    for _called in (_name, RENAMED.get(_name, _name)):
        setattr(AsyncGroup, _called, _launching(_name))
dist.Backend.register_backend("asynchronous", AsyncGroup, devices=["cpu"])

RANKS, LATE = 3, 1
TIMEOUT = 3.0


def logged(case: Callable[[], None]) -> Callable[[], list[str]]:
    """The case in a process group that returns at once; returns the lines that this rank logs."""

    @functools.wraps(case)
    def logged_case() -> list[str]:
        rank, store = dist.get_rank(), _get_default_store()
        shutdown_process_group()
        own = dist.PrefixStore("async", store)
        dist.init_process_group("asynchronous", store=own, rank=rank, world_size=RANKS)
        assert isinstance(dist.group.WORLD, AsyncGroup)

        lines = captured_lines()
        case()
        dist.barrier()
        return lines

    return logged_case


@logged
def zero_step() -> None:
    """The gradients of one rank come too late for ZeRO's reduce-scatter."""
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    booster = Booster(plugin=SequenceParallelPlugin(stage=2, precision="fp32"))
    model = nn.Linear(5, 7)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watched(lambda hold: backward(booster, model, optimizer, hold))


def backward(booster: Any, model: nn.Module, optimizer: Any, hold: Any) -> None:
    if dist.get_rank() == LATE:
        model.module.weight.register_hook(lambda gradient: hold())
    booster.backward(model(torch.ones(2, 5)).sum(), optimizer)


def watched(step: Any) -> None:
    """One step with asynchronous collectives; ``hold`` returns when the watchdog would act."""
    group = dist.group.WORLD
    with recorded_exits() as codes, Watchdog(join_rendezvous(), collective_timeout=TIMEOUT):

        def hold() -> None:
            # Returns nothing, as a hook on a gradient must.
            wait_until(lambda: codes)

        group.asynchronous = True
        step(hold)
        group.synchronize()  # as loss.tolist() would
        wait_until(lambda: codes)
    group.asynchronous = False


@logged
def joined_late() -> None:
    """One rank launches a collective after ``collective_timeout``, and before that is reported."""
    group = dist.group.WORLD
    with recorded_exits(), Watchdog(join_rendezvous(), collective_timeout=TIMEOUT):
        group.asynchronous = True
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == LATE:
            time.sleep(TIMEOUT + 1.7)
        dist.all_reduce(torch.ones(2))
        group.synchronize()
        time.sleep(TIMEOUT + 4)  # until the second all_reduce is overdue as well
    group.asynchronous = False


@pytest.mark.slow
def test_zeros_reduce_scatter_is_named_with_its_shape_and_ranks() -> None:
    for rank, lines in enumerate(run_ranks(RANKS, zero_step)):
        assert re.match(
            rf"rank {rank} stops: rank [02] has waited 3 s \(collective_timeout\) for ", lines[0]
        ), lines

        # 35 weights and 7 biases, both padded to a multiple of three; each rank gets a third.
        tensors = r"reduce_scatter_(?:tensor|single)\(output \[15\] float32, input \[45\] float32\)"
        assert re.search(
            tensors + r", number \d+ of process group 0 \(ranks 0, 1, 2\), called ", lines[0]
        ), lines
        assert re.search(
            r"at zero/low_level/low_level_optim.py:\d+ \(\w+\): ranks \[0, 2\] joined", lines[0]
        ), lines

        missing = (
            r"missing: rank 1, which has called \d+ and is at .*polling.py:\d+ \(wait_until\)$"
        )
        assert re.search(missing, lines[0]), lines


@pytest.mark.slow
def test_a_rank_that_launches_late_does_not_end_the_run() -> None:
    assert run_ranks(RANKS, joined_late) == [[], [], []]


def test_functions_are_replaced_while_recording_only() -> None:
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, "new_group")}
    recorder = CollectiveRecorder(timedelta(seconds=5))
    recorder.start()
    try:
        for name, function in before.items():
            assert getattr(dist, name) is not function
            assert inspect.signature(getattr(dist, name)) == inspect.signature(function)
    finally:
        recorder.stop()
    assert before == {name: getattr(dist, name) for name in before}


def time_of_a_record(recorder: CollectiveRecorder, tensor: torch.Tensor) -> float:
    """Seconds, as the mean of 400."""
    start = time.thread_time()
    for _ in range(400):
        call = recorder._record_call("all_reduce", {"tensor": tensor, "async_op": True})
        recorder._record_return(call)
    return (time.thread_time() - start) / 400


def test_a_record_costs_microseconds_and_keeps_no_tensor() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recorder = CollectiveRecorder(timedelta(seconds=5))
    try:
        tensor = torch.ones(4)
        recorder.start()
        seconds = min(time_of_a_record(recorder, tensor) for _ in range(5))
        dist.all_reduce(tensor)
        newest = recorder.pending()[-1]
    finally:
        recorder.stop()
        shutdown_process_group()

    print(f"{1e6 * seconds:.1f} microseconds")
    assert seconds < 100e-6, f"{1e6 * seconds:.1f} microseconds"
    assert newest.number == 2001 and newest.returned
    assert "all_reduce(tensor [4] float32), number 2001 of process group" in str(newest)
    assert "tests/distributed/test_watchdog_async.py" in newest.location
