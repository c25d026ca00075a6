"""Check of somebody's parallelism: one process against P ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .interface import DefinitionError, Difference, Finding, Report
from .layouts import distance, match, partitions, wide
from .recording import OUTPUT
from .run import RankResult, Work, run_ranks

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}
# Of the rounding error of one process, as ranks round in another order.
ROUNDING = 8.0
# Gradients that cancel have errors of the other gradients' size.
CANCELLED = 1e-3
REPEATS = {
    "random": "a second run with the same seed differs",
    "seed": "another seed on each rank changes the result: random numbers are drawn on each rank",
    "batch": "the outputs of a batch differ from the outputs of its samples alone",
    "adapter": "the output changes where the adapter's weights are zero: it is not fresh",
}


def check_parallel(
    definition: Any,
    *,
    ranks: int = 2,
    seed: int = 0,
    dtype: str = "float64",
    seconds: float = 60.0,
    device: str = "cpu",
) -> Report:
    """Compare a model on P ranks, under somebody's parallelism, with the same model on one.

    The ranks are processes of this host, which the check starts.

    Args:
        definition: a file's path, or an object (such as a module) with ``build() -> nn.Module``,
            ``batch(seed) -> dict``, the model's keyword arguments with the batch on axis 0,
            ``apply(model, group)``, which applies the parallelism in place and may return
            ``Applied`` or how gradients are reduced, and optionally ``step(model, batch)``, which
            returns "loss", "gradient_norm", "validation_loss", or some of them, and leaves the
            weights as they are.
        ranks: P, 2 or more.
        dtype: of weights and inputs. In float64, casts to lower precisions are lifted to it.
        seconds: after which a rank that has not ended is waiting.
        device: "cpu" (gloo), or "cuda" (NCCL; gloo if there are fewer GPUs than ranks).

    Raises:
        DefinitionError (a ValueError): if the definition cannot be checked.
    """
    if dtype not in DTYPES or ranks < 2:
        raise DefinitionError(
            f"got dtype {dtype!r} and {ranks} ranks; expected one of {', '.join(DTYPES)}, and 2 "
            "ranks or more; change them"
        )
    report = Report(ranks)
    outcomes = run_ranks(Work(definition, ranks, seed, DTYPES[dtype], device, seconds))
    report.findings = [outcome for outcome in outcomes if isinstance(outcome, Finding)]
    results = [outcome for outcome in outcomes if isinstance(outcome, RankResult)]
    if not report.findings:
        comparison = Comparison(results, report)
        comparison.compare_modules()
        comparison.compare_gradients()
        comparison.compare_results()
        comparison.compare_repetitions()
    return report


class Comparison:
    """Comparison of all ranks' traces with the trace of one process."""

    def __init__(self, results: list[RankResult], report: Report) -> None:
        self.results, self.report = results, report
        self.reference, self.exact = results[0].reference, results[0].exact
        self.traces = [result.parallel for result in results]
        used = [trace.lowest for trace in (self.reference, *self.traces)]
        lowest = max(used, key=lambda dtype: torch.finfo(dtype).eps)
        self.bound = BOUNDS.get(lowest, 1.0)
        report.precision = f"{str(lowest).removeprefix('torch.')}, bound {self.bound:.0e}"

    def compare_modules(self) -> None:
        """List the modules whose outputs differ, in the order of the forward pass."""
        report = self.report
        for key, tensor in self.reference.outputs.items():
            name = key[0]
            parts = [trace.outputs[key] for trace in self.traces if key in trace.outputs]
            bound, layout = self._bound(tensor, self.exact.outputs[key]), None
            if len(parts) == len(self.traces):
                # Without the number of the call.
                module = name.split(" ")[0]
                declared = self.results[0].applied.layouts.get(module)
                layout = match(tensor, parts, bound, declared, is_final=module == OUTPUT)
            if layout is None:
                shapes = [list(part.shape) for part in parts]
                report.not_compared.append(f"{name}: {shapes} on the ranks")
            elif layout.error > bound:
                report.modules.append(Difference(name, layout.error, bound, layout.layout))

        report.compared = 1 - len(report.not_compared) / len(self.reference.outputs)
        report.first_module = report.modules[0].name if report.modules else None

    def compare_gradients(self) -> None:
        """List the parameters and inputs whose gradients differ, and find the reduction."""
        parameters = self._gradients("gradients")
        tried = reductions(len(self.traces), self.results[0].applied.gradients)
        reduction = infer_reduction(parameters, tried)
        self.report.reduction = reduction.name
        self.report.gradients = kinds_of(parameters, reduction)

        # Nobody has to reduce an input's gradient: it is whole on each rank, or is reduced as the
        # parameters' gradients are or would be.
        inputs = self._gradients("inputs")
        others = reductions(len(self.traces), None if reduction.name == "none" else "none")
        self.report.inputs = kinds_of(inputs, infer_reduction(inputs, [reduction, *others]))

    def _gradients(self, kind: str) -> dict[str, Gradient]:
        reference, exact = getattr(self.reference, kind), getattr(self.exact, kind)
        ranks = [getattr(trace, kind) for trace in self.traces]
        names = [name for name in reference if all(name in gradients for gradients in ranks)]
        sizes = {name: float(reference[name].abs().max()) for name in names}
        floor = CANCELLED * max(sizes.values(), default=0.0)

        gradients: dict[str, Gradient] = {}
        for name in names:
            tolerance = self._bound(reference[name], exact[name], floor) * max(sizes[name], floor)
            parts = [wide(rank[name]) for rank in ranks]
            gradients[name] = Gradient(wide(reference[name]), parts, tolerance)
        return gradients

    def compare_results(self) -> None:
        """Compare the numbers of ``step``: each rank's, or a loss that is reduced as gradients."""
        for name, expected in self.reference.results.items():
            rank_numbers = [trace.results[name] for trace in self.traces]
            numbers = torch.tensor(rank_numbers, dtype=torch.float64)
            accepted = [numbers]
            if name == "loss" and self.report.reduction in ("sum", "mean"):
                accepted.append(getattr(numbers, self.report.reduction)())
            errors = [float((result - expected).abs().max()) for result in accepted]
            if not min(errors) <= self.bound * abs(expected):
                shown = ", ".join(f"{number:.6g}" for number in rank_numbers)
                text = f"{shown} on the ranks, {expected:.6g} in one process"
                self.report.findings.append(Finding(name.replace("_", " "), text))

    def compare_repetitions(self) -> None:
        """Findings of runs that must give the same again, and of bytes that change nothing."""
        for kind, text in REPEATS.items():
            error = max(result.repeats[kind] for result in self.results)
            if error > self.bound:
                self.report.findings.append(Finding(kind, f"{text} (by {error:.1e})"))

        num_bytes: Counter[tuple[str, str | None]] = Counter()
        for exchanges in zip(*(trace.exchanges for trace in self.traces)):
            if len({exchange.digest for exchange in exchanges}) == 1:
                num_bytes[exchanges[0].operation, exchanges[0].module] += exchanges[0].num_bytes
        for (operation, module), count in num_bytes.items():
            text = f"{operation} of {count} bytes that are the same on all ranks changes nothing"
            self.report.findings.append(Finding("bytes", text, module))

    def _bound(self, tensor: Tensor, exact: Tensor, floor: float = 0.0) -> float:
        """The error that rounding explains: of the precision, or a multiple of one process's."""
        return max(self.bound, min(ROUNDING * distance(tensor, exact, floor), 1.0))


class Reduction(NamedTuple):
    """A way to make the gradients of one process from the gradients of groups of ranks."""

    name: str
    groups: Sequence[Iterable[int]]

    def reduce(self, parts: list[Tensor]) -> list[Tensor]:
        """The gradient of each group; of each rank, if nothing is reduced."""
        grouped = [torch.stack([parts[rank] for rank in group]) for group in self.groups]
        return [x.mean(0) if self.name.startswith("mean") else x.sum(0) for x in grouped]


def reductions(num_ranks: int, declared: str | None) -> list[Reduction]:
    """The one that is declared, or all that are tried, in the order of preference."""
    tried = [Reduction("none", [[rank] for rank in range(num_ranks)])]
    for where, groups in partitions(num_ranks):
        tried += [Reduction(name + where, groups) for name in ("mean", "sum")]
    return [reduction for reduction in tried if declared in (None, reduction.name)]


class Gradient(NamedTuple):
    """A gradient of one process and of each rank, all in float64.

    Attributes:
        tolerance: largest difference that rounding explains.
    """

    reference: Tensor
    parts: list[Tensor]
    tolerance: float

    def kind(self, reduction: Reduction) -> str | None:
        """How it differs after the reduction; None if it does not."""
        if any(part.shape != self.reference.shape for part in self.parts):
            return "different"
        size = len(self.parts)
        factors = {None: 1.0, "times P": size, "divided by P": 1 / size, "sign": -1.0, "missing": 0}

        def kind_of(gradient: Tensor) -> str | None:
            for kind, factor in factors.items():
                difference = (gradient - self.reference * factor).abs().max()
                if difference <= self.tolerance * max(factor, 1):
                    return kind
            return "different"

        kinds = {kind_of(gradient) for gradient in reduction.reduce(self.parts)} - {None}
        return "different" if len(kinds) > 1 else next(iter(kinds), None)


def kinds_of(gradients: Mapping[str, Gradient], reduction: Reduction) -> dict[str, str]:
    """The kind of each gradient that differs."""
    kinds = {name: gradient.kind(reduction) for name, gradient in gradients.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def infer_reduction(gradients: Mapping[str, Gradient], tried: Iterable[Reduction]) -> Reduction:
    """The reduction that makes most gradients equal, then explains most of the others."""

    def unexplained(reduction: Reduction) -> tuple[int, int]:
        kinds = [*kinds_of(gradients, reduction).values()]
        return len(kinds), kinds.count("different")

    return min(tried, key=unexplained)
