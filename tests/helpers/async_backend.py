"""A process group that returns to the host at once, as NCCL does.

Values come when all ranks have joined.

Its collectives are gloo's, in the order in which they were launched, on a thread that stands for
the device. ``synchronize`` is what reading a value does on a device: it waits for the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

COLLECTIVES = (
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
for _name in COLLECTIVES:
    for _called in (_name, RENAMED.get(_name, _name)):
        setattr(AsyncGroup, _called, _launching(_name))
dist.Backend.register_backend("asynchronous", AsyncGroup, devices=["cpu"])
