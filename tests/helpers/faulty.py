"""``scripts/train.py`` with planted faults.

The file ``FAULTS`` has ``{attempt: [kind, rank, step]}``, where an attempt is what
``torchrun --max-restarts`` counts. Each step takes ``PAUSE`` seconds more.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensora_sp.runtime import run_lock
from opensora_sp.runtime.heartbeats import HeartbeatStore
from opensora_sp.runtime.rendezvous import Rendezvous
from opensora_sp.training.trainer import Trainer

RANK, ATTEMPT = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
KIND, AT_RANK, AT_STEP = json.loads(Path(os.environ["FAULTS"]).read_text()).get(
    ATTEMPT, ["none", -1, -1]
)
MINE = RANK == AT_RANK

run_lock.LOCAL_WAIT = 2.0  # a second run is refused soon


def stop() -> None:
    Path(os.environ["PIDS"], f"stopped-{ATTEMPT}").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_before(plain: Any, kind: str) -> Any:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        if MINE and kind == KIND:
            stop()
        return plain(*args, **kwargs)

    return stopped


def step_of(plain: Any) -> Any:
    def step(self: Trainer, number: int, *args: Any, **kwargs: Any) -> Any:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if MINE and number == AT_STEP:
            if KIND == "raise":
                raise ValueError("got a planted error; expected none; remove it")
            if KIND == "stop":
                stop()
        return plain(self, number, *args, **kwargs)

    return step


Trainer._step = step_of(Trainer._step)
Rendezvous.join = stopped_before(Rendezvous.join, "stop before joining")
dist.init_process_group = stopped_before(dist.init_process_group, "stop before the group")
HeartbeatStore.open = stopped_before(HeartbeatStore.open, "stop before heartbeats")
Path(os.environ["PIDS"], f"{ATTEMPT}-{RANK}").write_text(str(os.getpid()))
sys.argv[0] = "scripts/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
