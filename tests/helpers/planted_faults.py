"""``scripts/train.py`` with a signal or an error at a chosen moment.

The file ``FAULTS`` has ``{attempt: Fault}`` (see below), where an attempt is what ``torchrun
--max-restarts`` counts. Each step takes ``PAUSE`` seconds more. In the folder ``PIDS``, each rank
leaves its process number, the fault the time at which it struck, and rank 0 a line for each step.
Importing this imports nothing slow.
"""

from __future__ import annotations

import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from polling import wait_until

# The moment is that of the call.
MOMENTS = {
    "joining": "opensora_sp.runtime.rendezvous:Rendezvous.join",
    "group": "torch.distributed:init_process_group",
    "connecting": "opensora_sp.runtime.rendezvous:Rendezvous.connect",
    "lock": "opensora_sp.runtime.run_lock:RunLock.__enter__",
    "model": "opensora_sp.training.trainer:Trainer._build_model",
    "resume": "opensora_sp.training.checkpointing:TrainingState.load",
    "data": "opensora_sp.data.loader:MicroBatchReader.__getitem__",
    "encode": "opensora_sp.features.sharded:ShardedEncoder.encode",
    "forward": "opensora_sp.training.step:TrainingStep._forward_backward",
    "backward": "opensora_sp.plugin._colossalai:Booster.backward",
    "update": "opensora_sp.training.step:TrainingStep._update",
    "outcome": "opensora_sp.training.step:PendingResult.read",
    "save": "opensora_sp.checkpoint.writer:Saver._run",
    "write": "opensora_sp.checkpoint.filesystem:FileSystem.write",
    "commit": "opensora_sp.checkpoint.filesystem:FileSystem.rename",
    "validation": "opensora_sp.training.validation:Validator._validate",
    "end": "opensora_sp.data.loader:StepLoader.close",
    "leaving": "opensora_sp.runtime.watchdog:Watchdog.__exit__",
}
ONLY_RANK_0 = ("lock", "write", "commit")
PLANTED_ERROR = "got a planted error; expected none; remove it"


@dataclass(frozen=True)
class Fault:
    """What happens when a rank reaches a moment for the ``number``-th time in an attempt.

    Attributes:
        action: the name of a signal, or "raise".
        to: who gets the signal: "self", "rank 0", "rank 1", "ranks", "launcher", or "job": all of
            these with the workers of loaders, as of schedulers.
    """

    moment: str
    rank: int
    number: int
    action: str
    to: str = "self"


class Planted:
    """A fault in this rank, or in a worker of its loader."""

    def __init__(self, fault: Fault, folder: Path, attempt: str) -> None:
        self.fault, self.folder, self.attempt = fault, folder, attempt
        self.launcher, self.left = os.getppid(), fault.number

    def plant(self) -> None:
        module, _, path = MOMENTS[self.fault.moment].partition(":")
        owner, _, name = path.rpartition(".")
        place = pkgutil.resolve_name(f"{module}:{owner}" if owner else module)
        plain = getattr(place, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.strike()
            return plain(*args, **kwargs)

        setattr(place, name, watched)

    def strike(self) -> None:
        write_whole(self.folder / f"struck-{self.attempt}", repr(time.monotonic()))
        if self.fault.action == "raise":
            raise ValueError(PLANTED_ERROR)
        if self.fault.to == "self":
            return os.kill(os.getpid(), signal.Signals[self.fault.action])
        # From another process: a worker ends at the SIGTERM of its rank.
        name = self.fault.action.removeprefix("SIG")
        subprocess.run(["/bin/kill", f"-{name}", *map(str, self.targets())], check=False)

    def targets(self) -> list[int]:
        """Process numbers."""
        to = self.fault.to
        if to == "launcher":
            return [self.launcher]
        if to == "job":
            below = psutil.Process(self.launcher).children(recursive=True)
            return [self.launcher, *(process.pid for process in below)]
        ranks = (0, 1) if to == "ranks" else (int(to.removeprefix("rank ")),)
        return [self.rank(rank) for rank in ranks]

    def rank(self, rank: int) -> int:
        path = self.folder / f"{self.attempt}-{rank}"
        wait_until(path.exists)
        return int(path.read_text())


def write_whole(path: Path, text: str) -> None:
    """Another process reads all of it, or finds no file."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    partial.rename(path)


def watch_steps(path: Path | None, attempt: str) -> None:
    """Let each step take longer; with a path, write a line for each that has been queued."""
    from opensora_sp.training.step import TrainingStep

    plain = TrainingStep.run

    def watched(self: Any, step: int, *args: Any) -> Any:
        began = time.monotonic()
        time.sleep(float(os.environ["PAUSE"]))
        queued = plain(self, step, *args)
        line = {"attempt": int(attempt), "step": step + 1, "seconds": time.monotonic() - began}
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return queued

    TrainingStep.run = watched


def main() -> None:
    from opensora_sp.runtime import run_lock
    from opensora_sp.training import metrics

    rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = Path(os.environ["PIDS"])
    write_whole(folder / f"{attempt}-{rank}", str(os.getpid()))

    run_lock.LOCAL_WAIT = 2.0  # a second run is refused soon
    metrics.draw_loss = lambda run_dir: None  # a second of every save
    planned = json.loads(Path(os.environ["FAULTS"]).read_text()).get(attempt)
    if planned is not None and planned["rank"] == int(rank):
        Planted(Fault(**planned), folder, attempt).plant()
    watch_steps(folder / "steps.jsonl" if rank == "0" else None, attempt)

    sys.argv[0] = "scripts/train.py"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
