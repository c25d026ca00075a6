"""``scripts/train.py`` with planted faults.

The file ``FAULTS`` has ``{attempt: [kind, rank, step]}``, where an attempt is what
``torchrun --max-restarts`` counts. Each step takes ``PAUSE`` seconds more.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from opensora_sp.runtime import run_lock
from opensora_sp.training.trainer import Trainer

RANK, ATTEMPT = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
KIND, AT_RANK, AT_STEP = json.loads(Path(os.environ["FAULTS"]).read_text()).get(
    ATTEMPT, ["none", -1, -1]
)
MINE = RANK == AT_RANK

run_lock.LOCAL_WAIT = 2.0  # a second run is refused soon


def step_of(plain: Any) -> Any:
    def step(self: Trainer, number: int, *args: Any, **kwargs: Any) -> Any:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if MINE and KIND == "raise" and number == AT_STEP:
            raise ValueError("got a planted error; expected none; remove it")
        return plain(self, number, *args, **kwargs)

    return step


Trainer._step = step_of(Trainer._step)
Path(os.environ["PIDS"], f"{ATTEMPT}-{RANK}").write_text(str(os.getpid()))
sys.argv[0] = "scripts/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
