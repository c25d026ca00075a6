"""The checker's work of one rank: the run of one process, then the parallel one, both recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils._pytree import tree_map

from .definition import Applied, DefinitionError, applied_of
from .layouts import distance
from .lifting import precision_of
from .loss import own_loss
from .recording import OUTPUT, Exchange, ExchangeRecorder, Recorder, digest, plain_name, whole

OTHER_SEED = 1000
ADAPTERS = ("lora", "adapter")


@dataclass
class Trace:
    """A recorded run.

    Attributes:
        outputs: of all modules, in the order of the forward pass.
        gradients, inputs: gradients of parameters and of inputs; None where there is none.
        results: numbers of ``step``.
        lowest: precision of the forward pass.
    """

    outputs: dict[str, list[Tensor]]
    results: dict[str, float]
    lowest: torch.dtype
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def final(self) -> list[Tensor]:
        """Outputs of the model itself, of all its calls."""
        calls = [call for name, call in self.outputs.items() if name.split(" ")[0] == OUTPUT]
        return [tensor for call in calls for tensor in call]


@dataclass
class RankResult:
    """Results of a rank.

    Attributes:
        repeats: kind of finding -> largest relative difference to a repetition of the run.
        reference: one process.
        exact: one process in float64.
    """

    parallel: Trace
    applied: Applied
    repeats: dict[str, float]
    exchanges: list[Exchange]
    reference: Trace
    exact: Trace


@dataclass
class Work:
    """A definition or its file, and how ranks run it."""

    definition: Any
    ranks: int
    seed: int
    dtype: torch.dtype
    device: str
    seconds: float

    def run(
        self, connect: Callable[[], dist.ProcessGroup], on_enter: Callable[[str], object]
    ) -> RankResult:
        """Record one process and this rank; all ranks call it."""
        # Before there is a process group, which a model could ask for.
        reference, exact, hashes = self._reference()
        group = connect()
        model = self._build()
        self._check_same(group, [hashes, self._hashes(model)])
        with refused_context_parallel(self.device):
            applied = applied_of(self.definition.apply(model, group), model)
            model, applied.model = applied.model or model, None
            recorder, expected = Recorder(on_enter), reference.outputs[OUTPUT]
            trace = self._trace(
                model, recorder=recorder, loss=lambda output: own_loss(output, expected, group)
            )
            repeats, exchanges = self._repeat(model, trace, dist.get_rank(group))
        return RankResult(trace, applied, repeats, exchanges, reference, exact)

    def _reference(self) -> tuple[Trace, Trace, dict[str, str]]:
        try:
            model = self._build()
            hashes = self._hashes(model)
            trace = self._trace(model, loss=own_loss)
            other = self._trace(model, seed=self.seed + OTHER_SEED)
            exact = self._trace(model.double(), dtype=torch.float64, loss=own_loss)
        except Exception as error:
            raise DefinitionError(
                f"got {type(error).__name__} from the model in one process ({error}); expected "
                "build() and batch(seed) to run without parallelism; mend them"
            ) from error
        if apart(trace, other) > 0:
            raise DefinitionError(
                "got other outputs from the same weights and batch under another seed, in one "
                "process; expected a forward pass that draws no random numbers; call model.eval() "
                "in build(), or draw in batch(seed)"
            )
        return trace, exact, hashes

    def _build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model: nn.Module = self.definition.build()
        return model.to(self.device, self.dtype)

    def _batch(self, dtype: torch.dtype) -> dict[str, Any]:
        def converted(leaf: Any) -> Any:
            leaf = leaf.to(self.device) if isinstance(leaf, Tensor) else leaf
            # Rounded as the run's inputs are, also in the exact run.
            return leaf.to(self.dtype).to(dtype) if is_floating(leaf) else leaf

        torch.manual_seed(self.seed)
        batch: dict[str, Any] = tree_map(converted, dict(self.definition.batch(self.seed)))
        return batch

    def _hashes(self, model: nn.Module) -> dict[str, str]:
        tensors = {**model.state_dict(), **self._batch(self.dtype)}
        return {name: digest(x) for name, x in tensors.items() if isinstance(x, Tensor)}

    def _check_same(self, group: dist.ProcessGroup, builds: list[dict[str, str]]) -> None:
        """Raise DefinitionError on all ranks if weights or batches of their builds differ."""
        rank_builds = [builds] * dist.get_world_size(group)
        dist.all_gather_object(rank_builds, builds, group=group)
        for place, hashes in enumerate(chain.from_iterable(rank_builds)):
            rank, first = place // len(builds), rank_builds[0][0]
            names = [name for name in first if hashes.get(name) != first[name]]
            if names:
                raise DefinitionError(
                    f"got another {names[0]} on rank {rank} than on rank 0, or in a second build "
                    f"({len(names)} tensors differ); expected the same weights and batch on all "
                    "ranks; make them from the seed alone, in build() and batch(seed)"
                )

    def _trace(
        self,
        model: nn.Module,
        *,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        batch: dict[str, Any] | None = None,
        recorder: Recorder | None = None,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> Trace:
        """Run the model once, with gradients if there is a ``loss`` of the output."""
        recorder, dtype = recorder or Recorder(), dtype or self.dtype
        batch = batch or self._batch(dtype)
        leaves = [name for name, leaf in batch.items() if is_floating(leaf)]
        for name in leaves:
            batch[name].requires_grad_(loss is not None)
        model.zero_grad()
        torch.manual_seed(self.seed if seed is None else seed)
        with precision_of(dtype) as observed, recorder.attached(model):
            results = self._step(model, batch, loss)

        trace = Trace(recorder.outputs, results, observed.lowest)
        if not trace.final:
            raise ValueError("the model is not called, or returns no tensor")
        if loss is not None:
            trace.inputs = {name: whole(batch[name].grad) for name in leaves}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    trace.gradients[plain_name(name)] = whole(parameter.grad)
        return trace

    def _step(
        self, model: nn.Module, batch: dict[str, Any], own: Callable[[Any], Tensor] | None
    ) -> dict[str, float]:
        """The numbers of the definition's step, whose backward pass is run unless it has been."""
        step = getattr(self.definition, "step", None)
        if step is not None:
            results = step(model, batch)
            is_done = any(parameter.grad is not None for parameter in model.parameters())
            if own is not None and not is_done:
                results["loss"].backward()
            return {name: float(result) for name, result in results.items()}

        with torch.set_grad_enabled(own is not None):
            output = model(**batch)
            if own is not None:
                own(output).backward()
        return {}

    def _repeat(
        self, model: nn.Module, trace: Trace, rank: int
    ) -> tuple[dict[str, float], list[Exchange]]:
        """Run again under changes that must not change the output."""
        recorder = Recorder()
        with ExchangeRecorder(recorder) as sent:
            repeats = {"random": apart(trace, self._trace(model, recorder=recorder))}
        other = self._trace(model, seed=self.seed + rank * OTHER_SEED)
        repeats["seed"] = apart(trace, other)

        batch = self._batch(self.dtype)
        lengths = [len(leaf) for leaf in batch.values() if isinstance(leaf, Tensor) and leaf.ndim]
        size = max(lengths, default=1)
        for index in range(size if size > 1 else 0):

            def sample(leaf: Any, index: int = index) -> Any:
                is_batch = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
                return leaf[index : index + 1] if is_batch else leaf

            alone = self._trace(model, batch={name: sample(leaf) for name, leaf in batch.items()})
            errors = map(distance, alone.final, map(sample, trace.final))
            repeats["batch"] = max(repeats.get("batch", 0.0), *errors)

        # Last, since it is not undone.
        for name, parameter in model.named_parameters():
            if any(word in name.lower() for word in ADAPTERS):
                parameter.detach().zero_()
        repeats["adapter"] = apart(trace, self._trace(model))
        return repeats, sent.exchanges


def is_floating(leaf: Any) -> bool:
    """True for a tensor that has a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def apart(trace: Trace, other: Trace) -> float:
    """The largest relative difference of two runs' final outputs and numbers."""
    errors = [*map(distance, other.final, trace.final)]
    pairs = zip(other.results.values(), trace.results.values())
    errors += [distance(torch.tensor(got), torch.tensor(expected)) for got, expected in pairs]
    return max(errors) if len(trace.final) == len(other.final) else float("inf")


@contextmanager
def refused_context_parallel(device: str) -> Iterator[None]:
    """Refuse torch's own context parallel, which has kernels for GPUs alone, by its name."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DefinitionError(
            "got torch.distributed.tensor.experimental's context parallel on CPUs; expected a "
            "parallelism that runs there, as torch's needs the attention kernels of GPUs; check it "
            "with --device cuda"
        )

    names = ("_context_parallel_buffers", "_enable_cp_dtensor_dispatcher")
    with ExitStack() as stack:
        for name in names if device == "cpu" else ():
            stack.enter_context(mock.patch.object(_attention, name, refuse))
        yield
