"""Moments of a run at which a test does something: around a call, or an operation on a file."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.checkpoint.paths import checkpoint_name, checkpoint_step


@dataclass(frozen=True)
class Moment:
    """Before or after a call in this process; also within a write, of which a byte is missing.

    Attributes:
        what: a function ("opensora_sp.training.step:TrainingStep._update"), or what the save of
            ``SAVE_OF`` does to a file ("rename .partial-{new}"), relative to the run's folder. The
            save before it is that of ``{old}``.
        number: of the call, from 0.
    """

    what: str
    when: str = "before"
    number: int = 0

    def plant(self, action: Callable[[], None]) -> None:
        """Let this process do it then, once."""
        counter = _Counter(self, action)
        if ":" in self.what:
            _plant_call(self.what, counter)
        else:
            _plant_operation(self.what, counter)


SAVE_OF, BEFORE_IT = 4, 2  # steps


class _Counter:
    def __init__(self, moment: Moment, action: Callable[[], None]) -> None:
        self.moment, self.action, self.count = moment, action, 0

    def run(self, call: Callable[[], Any], written: Path | None = None) -> Any:
        """Run a call, with the action where this is the one."""
        number, self.count = self.count, self.count + 1
        if number != self.moment.number:
            return call()

        if self.moment.when == "before":
            self.action()
        result = call()
        if self.moment.when == "within":
            assert written is not None, "only a write has an inside"
            os.truncate(written, written.stat().st_size - 1)
        if self.moment.when != "before":
            self.action()
        return result


def _plant_call(what: str, counter: _Counter) -> None:
    module, _, name = what.partition(":")
    owners, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{owners}" if owners else module)
    plain = getattr(owner, last)

    def counted(*args: Any, **how: Any) -> Any:
        return counter.run(lambda: plain(*args, **how))

    setattr(owner, last, counted)


def _plant_operation(what: str, counter: _Counter) -> None:
    from opensora_sp.training import checkpointing

    plain = checkpointing.CheckpointFolder
    wanted = what.format(new=checkpoint_name(SAVE_OF), old=checkpoint_name(BEFORE_IT))

    def folder(final: Path, files: Any, **how: Any) -> Any:
        is_ours = checkpoint_step(final) == SAVE_OF
        filesystem = _Operations(final.parent, wanted, counter) if is_ours else None
        return plain(final, files, filesystem=filesystem, **how)

    checkpointing.CheckpointFolder = folder


class _Operations(FileSystem):
    def __init__(self, run_dir: Path, wanted: str, counter: _Counter) -> None:
        self.run_dir, self.wanted, self.counter = run_dir, wanted, counter

    def perform(self, kind: str, path: Path, action: Callable[[], Any]) -> Any:
        if f"{kind} {path.relative_to(self.run_dir)}" != self.wanted:
            return super().perform(kind, path, action)
        return super().perform(kind, path, lambda: self.counter.run(action, path))
