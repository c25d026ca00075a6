"""Check of somebody's parallelism: one process against P ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .definition import DefinitionError, load_definition
from .gradients import Gradients, reductions
from .layouts import Match, distance, match
from .ranks import run_as_rank, run_ranks
from .recording import OUTPUT
from .report import Finding, ModuleDifference, Report
from .run import RankResult, Work

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

    The ranks are processes of this host, which the check starts; where there is a process group, as
    under torchrun, they are its ranks, which all call it and get the same report.

    Args:
        definition: a file's path, or an object (such as a module) with ``build() -> nn.Module``,
            ``batch(seed) -> dict``, the model's keyword arguments with the batch on axis 0,
            ``apply(model, group)``, which applies the parallelism in place and may return
            ``Applied`` or how gradients are reduced, and optionally ``step(model, batch)``, which
            returns "loss", "gradient_norm", "validation_loss", or some of them, and leaves the
            weights as they are.
        ranks: P, 2 or more, unless there is a process group.
        dtype: of weights and inputs. In float64, casts to lower precisions are lifted to it.
        seconds: after which a rank that has not ended is waiting.
        device: "cpu" (gloo), or "cuda" (NCCL; gloo if there are fewer GPUs than ranks); with a
            process group, the device of its rank.

    Raises:
        DefinitionError (a ValueError): if the definition cannot be checked.
    """
    if dtype not in DTYPES or ranks < 2:
        raise DefinitionError(
            f"got dtype {dtype!r} and {ranks} ranks; expected one of {', '.join(DTYPES)}, and 2 "
            "ranks or more; change them"
        )
    functions = load_definition(definition)
    work = Work(definition, ranks, seed, DTYPES[dtype], device, seconds)
    report = Report(ranks)
    if dist.is_initialized():
        work.definition, report.ranks = functions, dist.get_world_size()
        results = run_as_rank(work)
    else:
        started = run_ranks(work)
        report.findings = [rank.finding for rank in started if rank.finding]
        results = [rank.result for rank in started if rank.result]

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
        self.applied = results[0].applied
        self.traces = [result.parallel for result in results]
        used = [trace.lowest for trace in (self.reference, *self.traces)]
        lowest = max(used, key=lambda dtype: torch.finfo(dtype).eps)
        self.bound = BOUNDS.get(lowest, 1.0)
        report.precision = f"{str(lowest).removeprefix('torch.')}, bound {self.bound:.0e}"

    def compare_modules(self) -> None:
        """List the modules whose outputs differ, in the order of the forward pass."""
        report = self.report
        for name, tensors in self.reference.outputs.items():
            rank_tensors = [trace.outputs.get(name, []) for trace in self.traces]
            if any(len(outputs) != len(tensors) for outputs in rank_tensors):
                report.not_compared.append(f"{name}: not called alike on the ranks")
                continue

            rows = [
                self._difference(name, index, tensor, [outputs[index] for outputs in rank_tensors])
                for index, tensor in enumerate(tensors)
            ]
            if None in rows:
                shapes = [list(outputs[rows.index(None)].shape) for outputs in rank_tensors]
                report.not_compared.append(f"{name}: {shapes} on the ranks")
            worst = max(filter(None, rows), key=lambda row: row.error / row.bound, default=None)
            if worst is not None and worst.error > worst.bound:
                report.modules.append(worst)

        report.compared = 1 - len(report.not_compared) / len(self.reference.outputs)
        report.first_module = report.modules[0].name if report.modules else None

    def _difference(
        self, name: str, index: int, tensor: Tensor, parts: list[Tensor]
    ) -> ModuleDifference | None:
        """The error of an output; None if no layout explains its shapes."""
        module = name.split(" ")[0]
        bound = self._bound(tensor, self.exact.outputs[name][index])
        declared, is_final = self.applied.layouts.get(module), module == OUTPUT
        layout = match(tensor, parts, bound, declared=declared, is_final=is_final)
        if layout is None and is_final:
            layout = Match(float("inf"), f"{[list(part.shape) for part in parts]} on the ranks")
        return layout and ModuleDifference(name, layout.error, bound, layout.layout)

    def compare_gradients(self) -> None:
        """List the parameters and inputs whose gradients differ, and find the reduction."""
        parameters = self._gradients("gradients")
        reduction = parameters.infer(reductions(len(self.traces), self.applied.gradients))
        self.report.reduction = str(reduction)
        self.report.gradients = parameters.kinds(reduction)

        # Nobody has to reduce an input's gradient: it is whole on each rank, or is reduced as the
        # parameters' gradients are or would be.
        inputs = self._gradients("inputs")
        others = reductions(len(self.traces), None if reduction.name == "none" else "none")
        self.report.inputs = inputs.kinds(inputs.infer([reduction, *others]))

    def _gradients(self, kind: str) -> Gradients:
        exact = getattr(self.exact, kind)
        ranks = [getattr(trace, kind) for trace in self.traces]
        reference = {
            name: gradient
            for name, gradient in getattr(self.reference, kind).items()
            if gradient is not None and all(name in gradients for gradients in ranks)
        }
        sizes = [float(gradient.abs().max()) for gradient in reference.values()]
        floor = CANCELLED * max(sizes, default=0.0)
        bounds = {name: self._bound(reference[name], exact[name], floor) for name in reference}
        parts = {name: [gradients[name] for gradients in ranks] for name in reference}
        return Gradients(reference, parts, bounds, floor)

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
            error = max(result.repeats.get(kind, 0.0) for result in self.results)
            if error > self.bound:
                self.report.findings.append(Finding(kind, f"{text} (by {error:.1e})"))

        num_bytes: Counter[tuple[str, str | None]] = Counter()
        for exchanges in zip(*(result.exchanges for result in self.results)):
            if len({exchange.digest for exchange in exchanges}) == 1:
                num_bytes[exchanges[0].operation, exchanges[0].module] += exchanges[0].num_bytes
        for (operation, module), count in num_bytes.items():
            text = f"{operation} of {count} bytes that are the same on all ranks changes nothing"
            self.report.findings.append(Finding("bytes", text, module))

    def _bound(self, tensor: Tensor, exact: Tensor, floor: float = 0.0) -> float:
        """The error that rounding explains: of the precision, or a multiple of one process's."""
        return max(self.bound, min(ROUNDING * distance(tensor, exact, floor), 1.0))
