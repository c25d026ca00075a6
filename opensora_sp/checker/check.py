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
from .ranks import Outcome, run_as_rank, run_ranks
from .recording import plain_name
from .report import Finding, ModuleDifference, Report
from .run import RankResult, Trace

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}
# Of the rounding error of one process, which ranks round in another order.
ROUNDING = 8.0
# Gradients that cancel have errors of the other gradients' size.
CANCELLED = 1e-3
REPEATS = {
    "random": "a second run with the same seed differs",
    "seed": "another seed on each rank changes the result: random numbers are drawn on each rank",
    "batch": "the outputs of a batch differ from the outputs of its samples alone",
    "adapter": "the output changes where the adapter's weights are zero; a fresh adapter adds "
    "nothing",
}


def check_parallel(
    definition: Any,
    *,
    ranks: int = 2,
    seed: int = 0,
    dtype: str = "float64",
    seconds: float = 60.0,
) -> Report:
    """Compare a model on P ranks, under somebody's parallelism, with the same model on one.

    The ranks are gloo processes of this host, or torchrun's, on GPUs where there are any.

    Args:
        definition: a file's path, or an object (such as a module) with ``build() -> nn.Module``,
            ``batch(seed) -> dict``, the model's keyword arguments with the batch on axis 0,
            ``apply(model, group)``, which applies the parallelism in place and may return
            ``Applied`` or how gradients are reduced, and optionally ``step(model, batch)``, which
            returns "loss", "gradient_norm", "validation_loss", or some of them.
        ranks: P, unless torchrun has started them.
        dtype: of weights and inputs. In float64, casts to lower precisions are lifted to it.
        seconds: after which a rank that has not ended is waiting.

    Raises:
        DefinitionError (a ValueError): if the definition cannot be checked.
    """
    is_launched = dist.is_torchelastic_launched() or dist.is_initialized()
    if dtype not in DTYPES or (ranks < 2 and not is_launched):
        raise DefinitionError(
            f"got dtype {dtype!r} and {ranks} ranks; expected one of {', '.join(DTYPES)}, and 2 "
            "ranks or more; change them"
        )
    functions = load_definition(definition)
    if is_launched:
        outcomes = run_as_rank(functions, seed, DTYPES[dtype], seconds)
    else:
        outcomes = run_ranks(definition, ranks, seed, DTYPES[dtype], seconds)
    report = Report(len(outcomes))
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if len(results) < len(outcomes):
        report.findings += failures(outcomes)
        return report
    Comparison(results, report).run()
    return report


def failures(outcomes: list[Outcome]) -> list[Finding]:
    """Findings of ranks that raised, and of ranks that wait for others."""
    findings = []
    for rank, outcome in enumerate(outcomes):
        if outcome.raised:
            text = f"rank {rank} raises {outcome.raised}"
            findings.append(Finding("error", text, outcome.module))
        elif outcome.stack:
            text = f"rank {rank} waits:\n{outcome.stack}"
            findings.append(Finding("waiting", text, outcome.module))
    return findings


class Comparison:
    """Comparison of all ranks' traces with the trace of one process."""

    def __init__(self, results: list[RankResult], report: Report) -> None:
        assert results[0].reference is not None
        self.reference: Trace = results[0].reference
        self.exact = results[0].exact
        self.traces = [result.parallel for result in results]
        self.results = results
        self.applied = results[0].applied
        self.report = report
        lowest = max(
            (trace.lowest for trace in (self.reference, *self.traces)),
            key=lambda dtype: torch.finfo(dtype).eps,
        )
        self.bound = BOUNDS.get(lowest, BOUNDS[torch.bfloat16])
        name = str(lowest).removeprefix("torch.")
        report.precision = f"{name}, bound {self.bound:.0e}"

    def run(self) -> None:
        """Fill the report."""
        self.compare_modules()
        self.compare_gradients()
        self.compare_results()
        self.compare_repeats()
        self.compare_exchanges()

    def compare_modules(self) -> None:
        """List the modules whose outputs differ, in the order of the forward pass."""
        layouts = {plain_name(name): layout for name, layout in self.applied.layouts.items()}
        report, num_compared = self.report, 0
        for name, tensors in self.reference.outputs.items():
            rank_tensors = [trace.outputs.get(name) for trace in self.traces]
            if any(outputs is None or len(outputs) != len(tensors) for outputs in rank_tensors):
                report.not_compared.append(f"{name}: not called alike on the ranks")
                continue

            base_name = name.split(" ")[0]
            worst: ModuleDifference | None = None
            is_compared = True
            for index, tensor in enumerate(tensors):
                parts = [outputs[index] for outputs in rank_tensors if outputs is not None]
                bound = self._bound(tensor, self._exact_output(name, index))
                match_ = match(
                    tensor,
                    parts,
                    bound,
                    declared=layouts.get(base_name),
                    is_final=base_name == "output",
                )
                if match_ is None and base_name == "output":
                    shapes = " and ".join(str(list(part.shape)) for part in parts)
                    match_ = Match(float("inf"), f"{shapes} on the ranks")
                if match_ is None:
                    shapes = sorted({str(list(part.shape)) for part in parts})
                    report.not_compared.append(
                        f"{name}: {' and '.join(shapes)} on the ranks, {list(tensor.shape)} in one"
                    )
                    is_compared = False
                    break
                if match_.error > bound and (worst is None or match_.error > worst.error):
                    worst = ModuleDifference(name, match_.error, bound, match_.layout)
            num_compared += is_compared
            if is_compared and worst is not None:
                report.modules.append(worst)

        report.compared = num_compared / max(len(self.reference.outputs), 1)
        if report.modules:
            report.first_module = report.modules[0].name

    def compare_gradients(self) -> None:
        """List the parameters and inputs whose gradients differ, and find the reduction."""
        parameters = self._gradients("gradients")
        tried = reductions(len(self.traces), self.applied.gradients)
        reduction = parameters.infer(tried)
        self.report.reduction = str(reduction)
        self.report.gradients = parameters.kinds(reduction)

        # Nobody has to reduce an input's gradient: it is whole on each rank, or is reduced as the
        # parameters' gradients are or would be.
        inputs = self._gradients("inputs")
        others = reductions(len(self.traces), None if reduction.name == "none" else "none")
        self.report.inputs = inputs.kinds(inputs.infer([reduction, *others]))

    def _gradients(self, kind: str) -> Gradients:
        reference = {
            name: gradient
            for name, gradient in getattr(self.reference, kind).items()
            if gradient is not None and all(name in getattr(trace, kind) for trace in self.traces)
        }
        floor = CANCELLED * max(
            (float(gradient.abs().max()) for gradient in reference.values() if gradient.numel()),
            default=0.0,
        )
        exact = getattr(self.exact, kind) if self.exact else {}
        bounds = {
            name: self._bound(gradient, exact.get(name), floor)
            for name, gradient in reference.items()
        }
        parts = {
            name: [getattr(trace, kind).get(name) for trace in self.traces] for name in reference
        }
        return Gradients(reference, parts, bounds, floor)

    def compare_results(self) -> None:
        """Compare the numbers of ``step``: each rank's, or a loss that is reduced as gradients."""
        bound = self.bound
        for name, expected in self.reference.results.items():
            numbers = [trace.results.get(name, float("nan")) for trace in self.traces]
            reduced = list(numbers)
            if name == "loss" and self.report.reduction != "none":
                total = sum(numbers)
                mean = self.report.reduction.startswith("mean")
                reduced = [total / len(numbers) if mean else total]

            def is_close(number: float, expected: float = expected) -> bool:
                return abs(number - expected) <= bound * max(abs(expected), 1e-30)

            if not all(map(is_close, reduced)) and not all(map(is_close, numbers)):
                shown = ", ".join(f"{number:.6g}" for number in numbers)
                text = f"{shown} on the ranks, {expected:.6g} in one process"
                self.report.findings.append(Finding(name.replace("_", " "), text))

    def compare_repeats(self) -> None:
        """Findings of runs that must give the same again."""
        for kind, text in REPEATS.items():
            error = max(result.repeats.get(kind, 0.0) for result in self.results)
            if error > self.bound:
                self.report.findings.append(Finding(kind, f"{text} (by {error:.1e})"))

    def compare_exchanges(self) -> None:
        """Findings of all-gathers and all-to-alls to which all ranks give the same tensor."""
        num_bytes: Counter[tuple[str | None, str]] = Counter()
        for exchanges in zip(*(result.exchanges for result in self.results)):
            exchange = exchanges[0]
            if len({other.digest for other in exchanges}) == 1 and not exchange.is_constant:
                num_bytes[exchange.module, exchange.operation] += exchange.num_bytes

        for (module, operation), sent in num_bytes.items():
            text = f"{operation} of {sent} bytes that are the same on all ranks changes nothing"
            self.report.findings.append(Finding("bytes", text, module))

    def _exact_output(self, name: str, index: int) -> Tensor | None:
        outputs = self.exact.outputs.get(name, []) if self.exact is not None else []
        return outputs[index] if index < len(outputs) else None

    def _bound(self, tensor: Tensor, exact: Tensor | None, floor: float = 0.0) -> float:
        """The error that rounding explains: of the precision, or a multiple of one process's."""
        rounding = distance(tensor, exact, floor) if exact is not None else 0.0
        return max(self.bound, min(ROUNDING * rounding, 1.0))
