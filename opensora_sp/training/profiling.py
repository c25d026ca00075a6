"""Traces of single steps with torch's profiler, in which the parts of a step have names.

A hook on the model names its blocks while a trace is recorded: "spatial" and "temporal" (forward,
and again in the recomputation of checkpointing). The training loop names "data", "encode", "loss",
"backward" and "optimizer". Collectives are "switch exchange" (forward), "switch backward", and so
on by their kind.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, record_function

from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel.communication import listening

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Steps:
    """Steps ``first`` to ``last`` of a run, counted from 1 as its log does."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Steps:
        """ "3" or "10-12".

        Raises:
            ValueError: for anything else.
        """
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        steps = cls(int(match[1]), int(match[2] or match[1])) if match else None
        if steps is None or not 1 <= steps.first <= steps.last:
            raise ValueError(
                f"got --profile {text!r}; expected a step, or a first and a last one, counted from "
                "1; write for example --profile 3 or --profile 10-12"
            )
        return steps

    def check(self, start: int, stop: int) -> None:
        """Raise ValueError unless a run of steps ``start + 1`` to ``stop`` has all of them."""
        if not start < self.first <= self.last <= stop:
            raise ValueError(
                f"got --profile {self}, and a run of steps {start + 1} to {stop}; expected some of "
                "these; choose steps that this run takes"
            )

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


class StepProfiler:
    """Writes ``profile/steps_<steps>.rank<rank>.json.gz`` into a run's folder. Every rank has one.

    Steps are slower while they are traced: the profiler has an overhead, and writing the trace
    counts as time of its last step.
    """

    def __init__(self, model: ConditionedModel, run_dir: Path, steps: Steps | None) -> None:
        self.model, self.run_dir, self.steps = model, run_dir, steps
        self._contexts = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around each step of the run."""
        if self.steps is not None and number == self.steps.first:
            # Hooks cost time in each forward pass, so only traced steps have them.
            self._contexts.enter_context(named_regions(self.model))
            self._profile = self._contexts.enter_context(profile())
        yield
        if self.steps is not None and number == self.steps.last:
            self._contexts.close()
            path = self.run_dir / "profile" / f"steps_{self.steps}.rank{dist.get_rank()}.json.gz"
            path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            hint = "open it with https://ui.perfetto.dev"
            logger.info("profile of steps %s: %s; %s", self.steps, path, hint)


@contextmanager
def named_regions(model: ConditionedModel) -> Iterator[None]:
    """Inside, parts of a model's forward pass and collectives have names for the profiler."""
    with ExitStack() as hooks:
        # The parts between two switches alternate.
        parts = cycle(("spatial", "temporal"))

        def name_part(segment: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            function, *others = args
            return record_function(next(parts))(function), *others

        hooks.callback(model.segment.register_forward_pre_hook(name_part).remove)
        hooks.enter_context(listening(_exchange))
        yield


def _exchange(kind: str, backward: bool, device: torch.device) -> AbstractContextManager[Any]:
    return record_function(f"{kind} {'backward' if backward else 'exchange'}")
