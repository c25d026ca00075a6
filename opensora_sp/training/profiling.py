"""Traces of single steps with torch's profiler, in which the parts of a step have names.

Hooks on the model name its parts while a trace is recorded: "embed", "spatial", "temporal"
(forward, and again in the recomputation of checkpointing), "switch" between them, "final". The
training loop names "data", "encode", "loss", "backward" and "optimizer". Collectives are "switch
exchange" (forward), "switch backward", and so on by their kind.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel.debug.comm_timing import listening

logger = logging.getLogger(__name__)
EMBEDDERS = re.compile(r"\w+_embedder|\w*t_block\w*|pos_embed")


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
        self.model, self.run_dir, self.wanted = model, run_dir, steps
        self._entered = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around each step of the run."""
        if self.wanted is not None and number == self.wanted.first:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            activities = [ProfilerActivity.CPU, *cuda]
            self._entered.enter_context(named_regions(self.model))
            self._profile = self._entered.enter_context(profile(activities=activities))
        yield
        if self.wanted is not None and number == self.wanted.last:
            self._entered.close()
            self._export(self.wanted)

    def _export(self, steps: Steps) -> None:
        path = self.run_dir / "profile" / f"steps_{steps}.rank{dist.get_rank()}.json.gz"
        path.parent.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        logger.info("profile of steps %s: %s; open it with https://ui.perfetto.dev", steps, path)


@contextmanager
def named_regions(model: ConditionedModel) -> Iterator[None]:
    """Inside, parts of a model's forward pass and collectives have names for the profiler."""
    with ExitStack() as stack:
        for name, module in model.named_children():
            if module is model.switch:
                stack.callback(_Region("switch", module).remove)
            elif name == "final_layer":
                stack.callback(_Region("final", module).remove)
            elif EMBEDDERS.fullmatch(name):
                stack.callback(_Region("embed", module).remove)

        parts = _Parts()
        stack.callback(model.register_forward_pre_hook(parts.begin).remove)
        stack.callback(model.segment.register_forward_pre_hook(parts.name_next).remove)
        stack.enter_context(listening(_exchange))
        yield


class _Region:
    """A profiler region around the calls of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self._open = name, ExitStack()
        self._handles = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        self._open.enter_context(record_function(self.name))

    def _leave(self, *_: Any) -> None:
        self._open.close()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Parts:
    """Names the parts between two switches, which alternate: spatial, temporal, spatial, ..."""

    def __init__(self) -> None:
        self._count = 0

    def begin(self, *_: Any) -> None:
        self._count = 0

    def name_next(self, segment: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        function, *others = args
        name = ("spatial", "temporal")[self._count % 2]
        self._count += 1
        return _named(name, function), *others


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return run


def _exchange(kind: str, backward: bool, device: torch.device) -> AbstractContextManager[Any]:
    return record_function(f"{kind} {'backward' if backward else 'exchange'}")
