"""The checker's work of one rank: the run of one process, then the parallel one, both recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils._pytree import tree_leaves, tree_map

from .definition import Applied, DefinitionError, applied_of
from .layouts import differing_axis, distance, wide
from .lifting import precision_of
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
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: dict[str, Tensor | None] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    lowest: torch.dtype = torch.float64

    @property
    def final(self) -> list[Tensor]:
        """Outputs of the model itself, of all its calls, and the numbers of ``step``."""
        names = [name for name in self.outputs if name.split(" ")[0] == OUTPUT]
        outputs = [tensor for name in names for tensor in self.outputs[name]]
        return outputs + [torch.tensor(number) for number in self.results.values()]


@dataclass
class RankResult:
    """Results of a rank; the traces of one process are rank 0's only.

    Attributes:
        exact: one process in float64, if the check itself runs in a lower precision.
        repeats: kind of finding -> largest relative difference to a repetition of the run.
    """

    parallel: Trace
    applied: Applied
    repeats: dict[str, float]
    exchanges: list[Exchange]
    reference: Trace | None = None
    exact: Trace | None = None


@dataclass
class Work:
    """A definition, and how a rank runs it."""

    definition: Any
    seed: int
    dtype: torch.dtype
    device: str = "cpu"

    def reference(self) -> tuple[Trace, Trace | None]:
        """The recorded run of one process, and the one in float64 if the dtype is lower."""
        try:
            model = self._build()
            trace = self._trace(model, self.seed)
            repetition = self._trace(model, self.seed, needs_backward=False)
            other = self._trace(model, self.seed + OTHER_SEED, needs_backward=False)
            exact = None
            if self.dtype != torch.float64:
                exact = self._trace(model.double(), self.seed, torch.float64)
        except DefinitionError:
            raise
        except Exception as error:
            raise DefinitionError(
                f"got {type(error).__name__} from the model in one process ({error}); expected "
                "build() and batch(seed) to run without parallelism; mend them"
            ) from error

        if max(largest(trace, repetition), largest(trace, other)) > 0:
            raise DefinitionError(
                "got other outputs from the same weights and batch under another seed, in one "
                "process; expected a forward pass that draws no random numbers; call model.eval() "
                "in build(), or draw in batch(seed)"
            )
        return trace, exact

    def parallel(
        self,
        group: dist.ProcessGroup,
        reference: Trace,
        on_enter: Callable[[str], object],
    ) -> RankResult:
        """The recorded run of this rank; all ranks of the group call it."""
        model = self._build()
        self._check_same(group, model)
        with refused_context_parallel() if self.device == "cpu" else nullcontext():
            applied = applied_of(self.definition.apply(model, group), model)
            assert applied.model is not None
            recorder = Recorder(on_enter)
            weigh = Weights(reference.outputs[OUTPUT], group)
            trace = self._trace(applied.model, self.seed, recorder=recorder, weigh=weigh)
            repeats, exchanges = self._repeat(applied.model, trace, dist.get_rank(group))
        applied.model = None
        return RankResult(trace, applied, repeats, exchanges)

    def _build(self) -> nn.Module:
        self._seed(self.seed)
        model = self.definition.build()
        if not isinstance(model, nn.Module):
            raise DefinitionError(
                f"got {type(model).__name__} from build(); expected a torch.nn.Module; return one"
            )
        return model.to(self.device, self.dtype)

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)

    def _batch(self, dtype: torch.dtype) -> dict[str, Any]:
        self._seed(self.seed)
        batch = self.definition.batch(self.seed)

        def converted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.is_floating_point():
                return leaf.to(self.device)
            # Rounded as the run's inputs are, also in the exact run.
            return leaf.to(self.device, self.dtype).to(dtype)

        return tree_map(converted, dict(batch))

    def _check_same(self, group: dist.ProcessGroup, model: nn.Module) -> None:
        """Raise DefinitionError on all ranks if their weights or batches differ."""
        named = [*model.named_parameters(), *model.named_buffers()]
        named += [
            (f"{name} of the batch", leaf)
            for name, leaf in self._batch(self.dtype).items()
            if isinstance(leaf, Tensor)
        ]
        digests: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(
            digests, {name: digest(tensor) for name, tensor in named}, group=group
        )
        for rank, of_rank in enumerate(digests):
            differing = [name for name in digests[0] if of_rank.get(name) != digests[0][name]]
            if differing:
                raise DefinitionError(
                    f"got another {differing[0]} on rank {rank} than on rank 0 ({len(differing)} "
                    "tensors differ); expected the same weights and batch on all ranks; make them "
                    "from the seed alone, in build() and batch(seed)"
                )

    def _trace(
        self,
        model: nn.Module,
        seed: int,
        dtype: torch.dtype | None = None,
        *,
        batch: dict[str, Any] | None = None,
        needs_backward: bool = True,
        recorder: Recorder | None = None,
        weigh: Weights | None = None,
    ) -> Trace:
        """Run the model once, with gradients unless they are not needed."""
        recorder = recorder or Recorder()
        batch = batch or self._batch(dtype or self.dtype)
        for leaf in batch.values():
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_(needs_backward)
        model.zero_grad(set_to_none=True)
        self._seed(seed)
        precision = precision_of(dtype or self.dtype)
        with kept_weights(model), precision as observed, recorder.attached(model):
            results = self._step(model, batch, needs_backward, weigh or Weights())

        trace = Trace(recorder.outputs, results=results)
        trace.lowest = observed.lowest
        if OUTPUT not in trace.outputs:
            raise DefinitionError(
                "got a run that does not call the model; expected step(model, batch) to call "
                "model(...), and a model that returns tensors; do so"
            )
        if needs_backward:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad
                    trace.gradients[plain_name(name)] = (
                        None if gradient is None else whole(gradient)
                    )
            trace.inputs = {
                name: None if leaf.grad is None else whole(leaf.grad)
                for name, leaf in batch.items()
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            }
        return trace

    def _step(
        self, model: nn.Module, batch: dict[str, Any], needs_backward: bool, weigh: Weights
    ) -> dict[str, float]:
        """The numbers of the definition's step; by default a loss of the checker's own."""
        step = getattr(self.definition, "step", None)
        if step is None:
            with torch.set_grad_enabled(needs_backward):
                loss = weigh.loss(model(**batch))
            results = {}
        else:
            results = step(model, batch)
            loss = results.get("loss")

        # A step with a norm of gradients has called it.
        is_done = any(parameter.grad is not None for parameter in model.parameters())
        if needs_backward and not is_done and isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        return {
            name: float(whole(number) if isinstance(number, Tensor) else number)
            for name, number in results.items()
        }

    def _repeat(
        self, model: nn.Module, trace: Trace, rank: int
    ) -> tuple[dict[str, float], list[Exchange]]:
        """Run again under changes that must not change the output."""
        repeats: dict[str, float] = {}
        recorder = Recorder()
        with ExchangeRecorder(recorder) as sent:
            again = self._trace(model, self.seed, needs_backward=False, recorder=recorder)
        repeats["random"] = largest(trace, again)
        repeats["seed"] = largest(
            trace, self._trace(model, self.seed + rank * OTHER_SEED, needs_backward=False)
        )

        sizes = [
            leaf.shape[0]
            for leaf in self._batch(self.dtype).values()
            if isinstance(leaf, Tensor) and leaf.ndim
        ]
        if max(sizes, default=1) > 1:
            repeats["batch"] = self._batch_error(model, trace, max(sizes))

        adapters = [
            parameter
            for name, parameter in model.named_parameters()
            if any(word in name.lower() for word in ADAPTERS)
        ]
        if adapters:
            with kept_weights(model), torch.no_grad():
                for parameter in adapters:
                    parameter.zero_()
                repeats["adapter"] = largest(
                    trace, self._trace(model, self.seed, needs_backward=False)
                )
        return repeats, sent.exchanges

    def _batch_error(self, model: nn.Module, trace: Trace, batch_size: int) -> float:
        """Largest difference of a sample's output between the batch and the sample alone."""
        error = 0.0
        for sample in range(batch_size):
            batch = {
                name: leaf[sample : sample + 1]
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch_size
                else leaf
                for name, leaf in self._batch(self.dtype).items()
            }
            alone = self._trace(model, self.seed, batch=batch, needs_backward=False)
            for name, tensors in trace.outputs.items():
                if name.split(" ")[0] != OUTPUT:
                    continue
                for tensor, single in zip(tensors, alone.outputs.get(name, [])):
                    if tensor.ndim and tensor.shape[0] == batch_size:
                        error = max(error, distance(single, tensor[sample : sample + 1]))
        return error


class Weights:
    """The checker's own loss: a fixed random weighting of the whole output.

    Args:
        reference: the outputs of one process; a rank's shard gets its part of the weights.
    """

    def __init__(
        self,
        reference: list[Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.reference, self.group = reference, group

    def loss(self, output: Any) -> Tensor:
        """The sum of the weighted entries, over their number in one process."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        total = torch.zeros((), dtype=torch.float64)
        for index, leaf in enumerate(leaves):
            if leaf.is_floating_point():
                local = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
                weights = self._weights(index, local)
                size = local.numel() if self.reference is None else self.reference[index].numel()
                total = total.to(local.device) + (wide(local) * weights).sum() / size
        return total

    def _weights(self, index: int, leaf: Tensor) -> Tensor:
        whole_shape = leaf.shape if self.reference is None else self.reference[index].shape
        generator = torch.Generator().manual_seed(index)
        weights = torch.randn(whole_shape, generator=generator, dtype=torch.float64)
        if self.group is not None:
            shapes: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(shapes, leaf.shape, group=self.group)
            if any(shape != whole_shape for shape in shapes):
                weights = self._part(weights, shapes)
        return weights.to(leaf.device)

    def _part(self, weights: Tensor, shapes: list[torch.Size]) -> Tensor:
        """The rank's part of the weights, of an output that stays cut."""
        axis = differing_axis(weights.shape, shapes)
        sizes = [shape[axis] for shape in shapes] if axis is not None else []
        if axis is None or sum(sizes) != weights.shape[axis]:
            # Reported as a difference of the output, whatever the gradients are.
            return torch.ones(shapes[dist.get_rank(self.group)], dtype=torch.float64)
        return weights.split(sizes, axis)[dist.get_rank(self.group)]


def largest(trace: Trace, other: Trace) -> float:
    """The largest relative difference of two runs' final outputs and numbers."""
    if len(trace.final) != len(other.final):
        return float("inf")
    pairs = zip(other.final, trace.final)
    return max((distance(got, expected) for got, expected in pairs), default=0.0)


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """Undo what the context writes into parameters, such as a step of an optimizer."""
    saved = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weights in saved:
                parameter.copy_(weights)


@contextmanager
def refused_context_parallel() -> Iterator[None]:
    """Refuse torch's own context parallel, which has kernels for GPUs alone, by its name."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DefinitionError(
            "got torch.distributed.tensor.experimental's context parallel on CPUs; expected a "
            "parallelism that runs there, as torch's needs the attention kernels of GPUs; start "
            "the check by torchrun on GPUs, in float32 or bfloat16"
        )

    with mock.patch.multiple(
        _attention, _context_parallel_buffers=refuse, _enable_cp_dtensor_dispatcher=refuse
    ):
        yield
