"""Trainings in which a rank hangs, freezes, skips a collective or lags, at a place of the run."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensora_sp.checkpoint import Saver
from opensora_sp.config import load_train_config
from opensora_sp.data import VideoTextDataset
from opensora_sp.runtime.rendezvous import Rendezvous
from opensora_sp.training import metrics, run
from opensora_sp.training.run import train
from opensora_sp.training.step import TrainingStep
from opensora_sp.training.trainer import Trainer
from opensora_sp.training.validation import Validator

# The function that a rank does not enter.
PLACES: dict[str, tuple[Any, str]] = {
    "joining": (Rendezvous, "join"),
    "the process group": (dist, "init_process_group"),
    "connecting": (Rendezvous, "connect"),
    "the start": (Trainer, "_build_model"),
    "reading": (VideoTextDataset, "_read"),
    "forward": (TrainingStep, "_forward_backward"),
    "the update": (TrainingStep, "_update"),
    "saving": (Saver, "_run"),
    "validation": (Validator, "_validate"),
    "the end": (run, "drain_process_group"),
}
FOREVER = 600.0
# Until the others have read a heartbeat with the place of a rank that is about to freeze.
SETTLED = 3.0
LAG = 2.0
FREEZES: dict[str, Callable[[], Any]] = {
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "hold the GIL": partial(ctypes.PyDLL(None).sleep, int(FOREVER)),
}
AFTERWARDS = {"skip": 0.0, "signal": SETTLED}


@dataclass(frozen=True)
class Hang:
    """What one rank does at a place.

    Attributes:
        kind: "stop" by SIGSTOP, "hold the GIL", so that no thread runs, "sleep" in Python, "raise"
            an error, "skip" the call, "lag" behind the others in each call, or "signal" that the
            rank is there and call it.
        call: which of the rank's calls at the place, counted from 1.
        in_worker: whether a worker of the rank's loader does so; its rank then waits for it.
    """

    kind: str
    place: str
    rank: int
    call: int = 1
    in_worker: bool = False

    def plant(self, struck: Path) -> None:
        """In a rank, which links ``struck`` to the time of its hang."""
        if int(os.environ["RANK"]) != self.rank:
            return
        owner, name = PLACES[self.place]
        plain, calls = getattr(owner, name), [0]

        # Calls no function of Python once it waits: heartbeats have the innermost frame.
        def hanging(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if self.kind == "lag":
                time.sleep(LAG)
            elif calls[0] == self.call:
                time.sleep(SETTLED if self.is_silent else 0)
                os.symlink(str(time.monotonic()), struck)
                FREEZES.get(self.kind, int)()
                if self.kind == "raise":
                    raise ValueError("got a planted error; expected none; remove it")
                time.sleep(AFTERWARDS.get(self.kind, FOREVER))
                if self.kind == "skip":
                    return None
            return plain(*args, **kwargs)

        # Stacks and reports show the name of the code.
        hanging.__code__ = hanging.__code__.replace(co_name=f"hangs in {self.place}")
        setattr(owner, name, hanging)

    @property
    def is_silent(self) -> bool:
        """Whether the rank sends no heartbeats."""
        return self.kind in ("stop", "hold the GIL")

    def named_by(self, other: int) -> re.Pattern[str]:
        """What another rank logs."""
        at = rf"\S+:\d+ \(hangs in {self.place}\)"
        if self.in_worker:
            at = r"\S+:\d+ \(\w+\)"
        stops = f"rank {other} stops: "

        if self.place == "joining":
            absent = f"expected all, but rank {self.rank} did not join"
            return re.compile(absent if self.rank else "got no response from rank 0 ")
        if self.place == "connecting":
            absent = f"expected all, but rank {self.rank} did not join"
            return re.compile(absent if self.rank else f"{absent}|got no response from the store")
        late = rf"got no process group of \d ranks within \S+ s: .*rank {self.rank} at {at}"
        if self.place == "the process group" and not self.is_silent:
            return re.compile(f"{stops}{late}")
        if self.kind == "raise":
            return re.compile(f"{stops}rank {self.rank} failed: ValueError: got a planted error")
        if not self.is_silent:
            return re.compile(
                rf"{stops}rank \d has waited \S+ s \(collective_timeout\) for .* missing: "
                rf"(.*; )?rank {self.rank}, which has called \d+ and is at {at}"
            )
        if self.rank == 0 and self.kind == "stop":
            # A thread of torch's, which needs no GIL, serves the store.
            return re.compile(
                rf"{stops}({late}|rank 0, which hosts the store of the heartbeats, has exited, is "
                rf"stopped or is cut off \(.*\); it was at {at})"
            )
        return re.compile(
            rf"{stops}({late}|(rank {self.rank} has sent no heartbeat for \S+ s \(peer_timeout\); "
            rf"it was |rank \d has waited .* missing: rank {self.rank}, which sends no heartbeats, "
            rf"has called \d+ and was )at {at})"
        )

    def cut_named_by(self, other: int) -> re.Pattern[str]:
        """What another rank logs where the network of the rank's host is cut."""
        if self.rank == 0:
            return re.compile(f"rank {other} stops: rank 0, which hosts the store .* is cut off ")
        return re.compile(
            f"rank {other} stops: rank {self.rank} has sent no heartbeat for .*; it was at "
        )

    def skip_named_by(self, other: int) -> re.Pattern[str]:
        """What another rank logs where the rank has skipped a collective."""
        of_rank = (
            rf"rank {self.rank} has waited .* missing: ",
            rf".*missing: (.*; )?rank {self.rank}, which has called \d+ and is at ",
            rf".*, or ranks have called another collective: rank {self.rank} is at ",
        )
        return re.compile(f"rank {other} stops: ({'|'.join(of_rank)})")


def trained(config: Path, options: list[str], hang: Hang | None = None, struck: Any = None) -> None:
    """Train in this rank, with a fault if there is one."""
    metrics.draw_loss = lambda run_dir: None
    if hang is not None:
        hang.plant(struck)
    train(load_train_config(config, options), resume="auto")
