"""Triton's kernels of the modulation: interpreted, against their reference, and compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from capabilities import CAPABILITIES
from interpreter import run_interpreted

from opensora_sp.models.conditions import Conditioning, Text
from opensora_sp.models.kernels import Kernels, Part, fused, using_kernels
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL, PatchGrid, Rows
from opensora_sp.parallel.strategies.rows import _entries_of_chunks


@dataclass(frozen=True)
class Case:
    """b samples of n rows of L tokens of width C, with entries for ``per`` (rows, tokens) of them.

    ``rows``: a range of all rows, if these tokens are not all of the samples'. ``across``: tokens
    and their gradients lie in memory as in the other layout.
    """

    samples: int = 2
    rows_per_sample: int = 3
    length: int = 5
    width: int = 72
    per: tuple[int, int] = (1, 1)
    rows: tuple[int, int] | None = None
    across: bool = False

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Entries as they are cut out of a modulation: shift, scale and gate lie alternately."""
        torch.manual_seed(0)
        start, stop = self.rows or (0, self.samples * self.rows_per_sample)
        shape = stop - start, self.length, self.width
        entries = torch.randn(self.samples, *self.per, 3, self.width, dtype=dtype)
        tokens = {name: torch.randn(shape, dtype=dtype) for name in ("x", "branch")}
        tokens["bias"] = torch.randn(self.width, dtype=dtype)
        return tokens | dict(zip(("shift", "scale", "gate"), entries.unbind(-2), strict=True))

    @property
    def part(self) -> Part | None:
        return None if self.rows is None else Part(self.rows[0], self.rows_per_sample)


PER_SAMPLE, PER_ROW, PER_TOKEN = (1, 1), (3, 1), (1, 5)
CASES = {
    "per sample": Case(),
    "per row": Case(per=PER_ROW),
    "per token of a row": Case(per=PER_TOKEN),
    "per row and token": Case(samples=1, per=(3, 5)),
    "many programs": Case(samples=1, rows_per_sample=7, length=5, width=16),
    "one token": Case(samples=1, rows_per_sample=1, length=1),
    "wide": Case(samples=1, rows_per_sample=2, length=2, width=1152, per=(1, 2)),
    "parts of samples": Case(rows=(1, 5)),
    "parts of samples, per row": Case(rows=(2, 6), per=PER_ROW),
    "across": Case(across=True),
    "no rows": Case(samples=1, rows_per_sample=0),
}
SLOW_CASES = {
    "an odd width": Case(width=33),
    "parts of samples, per token": Case(rows=(2, 4), per=PER_TOKEN),
    "across, per row": Case(across=True, per=PER_ROW),
    "across, parts of samples": Case(across=True, rows=(1, 5)),
}
ALL_CASES = CASES | SLOW_CASES
TOKENS_AND_GATE = ("x", "gate", "branch")
FUNCTIONS = {
    "norm_modulate": ("x", "shift", "scale"),
    "add_norm_modulate": ("x", "branch", "shift", "scale"),
    "add_norm_modulate with bias": ("x", "branch", "shift", "scale", "bias"),
    "add_gated": TOKENS_AND_GATE,
    "add_gated with bias": (*TOKENS_AND_GATE, "bias"),
    "add_gated_twice": TOKENS_AND_GATE,
    "add_gated_twice with bias": (*TOKENS_AND_GATE, "bias"),
}
# One case computes them without a bias as well.
WITHOUT_BIAS = ("add_norm_modulate", "add_gated", "add_gated_twice")


def results_of(case: Case, dtype: torch.dtype, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """Values and gradients of all functions, by name, for inputs rounded to dtype."""
    inputs = case.inputs(dtype)
    results = {}
    for function, names in FUNCTIONS.items():
        if function in WITHOUT_BIAS and case != CASES["per sample"]:
            continue
        own = {name: inputs[name].to(compute) for name in names}
        if case.across:
            own["x"] = laid_across(own["x"])
        own = {name: tensor.requires_grad_() for name, tensor in own.items()}
        outputs = getattr(fused, function.split()[0])(**own, part=case.part)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [inputs["branch"].to(compute) * (i + 1) for i in range(len(outputs))]
        if case.across:
            weights[0] = laid_across(weights[0])
        grads = torch.autograd.grad(outputs, list(own.values()), weights)

        results |= {f"{function}, {i}": z.detach() for i, z in enumerate(outputs)}
        results |= {f"{function}, gradient of {name}": z for name, z in zip(names, grads)}
    return results


def laid_across(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, row by row of the other layout."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def errors_of(titles: list[str], dtype: torch.dtype) -> dict[str, float]:
    """Of the kernels, from the reference in float64 and relative to the largest number."""
    from opensora_sp.models.kernels.triton import modulation

    errors = {}
    for title in titles:
        with using_kernels("torch"):
            exact = results_of(ALL_CASES[title], dtype, torch.float64)
        # Shares of some tokens each, so that programs begin and end within entries; few programs.
        shares = dict(SLOTS=3, LARGE_PROGRAMS=2, SMALL_PROGRAMS=3, COLUMNS=256)
        with mock.patch.multiple(modulation, **shares):
            results = results_of(ALL_CASES[title], dtype, dtype)
        for name, ours in results.items():
            wanted = exact[name]
            assert (ours.dtype, ours.shape) == (dtype, wanted.shape), (title, name)
            if ours.numel():
                error = (ours - wanted).abs().max() / wanted.abs().max().clamp(min=1)
                errors[f"{title}: {name}"] = float(error)
    return errors


@pytest.mark.parametrize(
    "title", [*CASES, *(pytest.param(title, marks=pytest.mark.slow) for title in SLOW_CASES)]
)
def test_values_and_gradients(title: str) -> None:
    for name, error in run_interpreted(errors_of, [title], torch.float32).items():
        assert error < 1e-6, (name, error)


def test_half_precision_rounds_once() -> None:
    """Where a result is written. The interpreter cuts bits off; devices round to the nearest.

    Backward of a sum and its norm begins with the sum as it was written.
    """
    titles = ["parts of samples, per token", "across, per row"]
    for name, error in run_interpreted(errors_of, titles, torch.bfloat16).items():
        roundings = 2 if "add_norm_modulate" in name and "gradient" in name else 1
        assert error <= roundings * torch.finfo(torch.bfloat16).eps, (name, error)


def gradients_of_biases(function: str) -> list[torch.Tensor]:
    """By the kernel, beside a gate that is trained and one that is frozen."""
    from opensora_sp.models.kernels.triton import modulation

    found = []
    for names in (FUNCTIONS[f"{function} with bias"], ("x", "branch", "bias"), ("bias",)):
        inputs = CASES["per row"].inputs(torch.float32)
        own = {name: inputs[name].requires_grad_(name in names) for name in TOKENS_AND_GATE}
        bias = inputs["bias"].requires_grad_()
        outputs = getattr(modulation, function)(**own, bias=bias)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found += torch.autograd.grad([z.square().sum() for z in outputs], bias)
    return found


@pytest.mark.parametrize(
    "function", ["add_gated", pytest.param("add_gated_twice", marks=pytest.mark.slow)]
)
def test_a_bias_has_its_gradient_beside_a_frozen_gate(function: str) -> None:
    trained, *frozen = run_interpreted(gradients_of_biases, function)
    assert trained.any() and all(torch.equal(one, trained) for one in frozen)


def of_local_rows(
    setting: Kernels, rows: Rows, frames: torch.Tensor, chunks: Sequence[int] = ()
) -> list[torch.Tensor]:
    """What a block's modulation makes of a rank's rows, in chunks, and gradients."""
    torch.manual_seed(0)
    modulation = torch.randn(rows.grid.num_samples, 2, 6, 16, requires_grad=True)
    x = torch.randn(rows.count, rows.length, 16, requires_grad=True)

    with using_kernels(setting):
        text = Text(torch.zeros(2, 16), [1, 1])
        conditioning = Conditioning(modulation, frames, text)
        condition = conditioning.of(rows.layout, rows)
        entries = condition.entries(torch.zeros(3, 16), 3, torch.tensor([0.5, 2.0]))

        sizes, outputs = chunks or [rows.count], []
        of_chunks = _entries_of_chunks(entries, condition.part, sizes)
        for tokens, (shift, scale, gate, part) in zip(x.split(sizes), of_chunks, strict=True):
            same, modulated = fused.norm_modulate(tokens, shift, scale, part)
            outputs.append(fused.add_gated(same, gate, modulated.square(), part))
        out = torch.cat(outputs)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (modulation, x))]


def differences_of_local_rows(layout: str) -> dict[str, float]:
    """Of kernels from the reference, for ranges of rows of two samples."""
    rows = PatchGrid(num_samples=2, latent_size=(3, 2, 2), patch_size=(1, 1, 1)).rows(layout)
    last, total = rows.total - 1, rows.total
    frames = torch.tensor([[True, False, False], [False, True, True]])
    found = {}
    for start, stop in ((0, total), (1, last), (2, 3), (last, total), (total, total)):
        local = rows.take(start, stop)
        wanted = of_local_rows("torch", local, frames)
        ours = of_local_rows("triton", local, frames)
        title = f"{layout} rows {start} to {stop}"
        found[title] = max(map(largest_difference, wanted, ours))

    local = rows.take(1, last)
    ours = of_local_rows("triton", local, frames, chunks=[1, local.count - 3, 2])
    wanted = of_local_rows("torch", local, frames)
    found["in chunks"] = max(map(largest_difference, wanted, ours))
    return found


def largest_difference(wanted: torch.Tensor, ours: torch.Tensor) -> float:
    assert wanted.shape == ours.shape
    scale = wanted.abs().max().clamp(min=1) if wanted.numel() else 1
    return float(((wanted - ours) / scale).abs().sum())


@pytest.mark.parametrize("layout", [SPATIAL, pytest.param(TEMPORAL, marks=pytest.mark.slow)])
def test_any_range_of_rows_finds_its_entries(layout: str) -> None:
    for name, difference in run_interpreted(differences_of_local_rows, layout).items():
        assert difference < 1e-5, (name, difference)


# E, activations of a token: what each launcher may read and write, forward or backward.
TRAFFIC = {
    "norm_modulate": 2,
    "add_norm_modulate": 4,
    "norm_modulate_backward": 4,
    "add_gated": 3,
    "add_gated_backward": 3,
    "add_gated_twice_backward": 5,
}


def launch(which: str, dtype: torch.dtype, device: str, *, rows: int, length: int) -> None:
    """Run a launcher for rows of a frame each, with conditioning frames, of the released width."""
    from opensora_sp.models.kernels.triton import modulation

    tokens = torch.empty(length, rows, 1152, dtype=dtype, device=device).transpose(0, 1)
    branch = torch.empty(rows, length, 1152, dtype=dtype, device=device)
    bias = torch.empty(1152, dtype=dtype, device=device)
    entries = torch.empty(1, rows, 1, 3, 1152, dtype=dtype, device=device).unbind(-2)
    shift, scale, gate = entries
    if which == "norm_modulate":
        modulation._norm_modulate(tokens, None, None, shift, scale, 0, 0)
    elif which == "add_norm_modulate":
        modulation._norm_modulate(tokens, branch, bias, shift, scale, 0, 0)
    elif which == "norm_modulate_backward":
        other = tokens.clone()
        modulation._norm_modulate_backward(tokens, scale, bias, other, branch, 0, 0)
    elif which == "add_gated":
        modulation._add_gated(tokens, gate, branch, bias, 0, 0)
    else:
        other = branch.clone() if "twice" in which else None
        modulation._add_gated_backward(gate, branch, bias, tokens, other, 0, 0)


@pytest.mark.parametrize("which", TRAFFIC)
def test_traffic_of_launches(which: str) -> None:
    """By their pointers, each of which is read or written once, sums of programs included."""
    from triton.runtime.jit import JITFunction

    rows, length, moved = 64, 1024, 0

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        nonlocal moved
        moved += sum(z.numel() * z.element_size() for z in args if isinstance(z, torch.Tensor))

    with mock.patch.object(JITFunction, "run", run):
        launch(which, torch.bfloat16, "meta", rows=rows, length=length)
    assert TRAFFIC[which] < moved / (rows * length * 1152 * 2) < TRAFFIC[which] + 0.17


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_builds(capability: int) -> None:
    """Tokens travel in 128 bits, registers are not spilled, and nothing is added by atomics."""
    from kernel_builds import builds_of

    for which in TRAFFIC:
        arguments = which, torch.bfloat16, "cpu"
        kernel, *sums = builds_of(launch, *arguments, rows=4, length=8, capability=capability)
        kernel.check(wide_loads=True, wide_stores=True)
        assert kernel.registers <= 128, which
        assert len(sums) == which.endswith("backward")
        for build in sums:
            build.check(wide_loads=True)
