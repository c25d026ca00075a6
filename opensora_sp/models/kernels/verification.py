"""Triton kernels and kernels of attention on a device against their references: values and
gradients of small examples.

The reference runs in float64 on the CPU, and in the dtype of the kernel there and on the device:
its error is what rounding does. A kernel may have a few times that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import isnan
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.importing import is_installed

from ..attention import attention
from ..attention_table import LABELS, Backend, Sequences
from ..packing import Lengths
from . import fused
from .examples import Example, examples_of, normal
from .fused import using_kernels

# Sums in another order, other approximations of exp and tanh. An error of plain torch on the device
# counts up to as many times its error on the CPU, so that a faulty device excuses nothing.
MAX_RATIO = 4.0
# Of the reference's error, which may be tiny by chance; in multiples of the dtype's epsilon.
MIN_ROUNDING = 2.0
MIN_ERROR = 2.5e-6
# A tensor of small values, such as a gradient that is zero but for rounding, is compared with this
# part of the largest one.
NOISE_FLOOR = 1e-3

# Some kernels of attention are wrong only where 128 does not divide a length, or leaves 64.
ODD_LENGTHS = (405, 704, 1590)
# Tokens of examples: more would take the CPU minutes.
MAX_LENGTH = 2048
# Numbers in one tensor of the definition: 16 MB in float64.
MAX_SCORES = 2**21
MANY_ROWS = 300
# All scores lie near this, so that their exponentials are zero in float32.
LOW_SCORE = -120.0
# Up to one tile of tokens no kernel is chosen for its speed.
TILE = 128

# Tests compile the kernels from here on.
CAPABILITY = (8, 0)
OBSTACLES = NO_TRITON, OLD_GPU = (
    "Triton is not installed",
    "the GPU's compute capability is below 8.0",
)

CPU = torch.device("cpu")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Of one result of an example: its error in units of the result's root mean square."""

    result: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        # NaN is never below.
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """The error in units of its bound; infinite if there is no number."""
        return float("inf") if isnan(self.error) else self.error / self.bound

    def __str__(self) -> str:
        return f"{self.result}: an error of {self.error:.2g}, where {self.bound:.2g} is rounding"


def obstacle(device: torch.device) -> str | None:
    """Why no kernel is compiled for a CUDA device, one of ``OBSTACLES``; None if they are."""
    if not is_installed("triton"):
        return NO_TRITON
    return OLD_GPU if torch.cuda.get_device_capability(device) < CAPABILITY else None


def verify_kernel(
    name: str, config: Any, dtype: torch.dtype, device: torch.device
) -> list[Difference]:
    """Compare all functions of a kernel with their references on a device, at a model's widths.

    Results in a 16-bit dtype are also compared in float32, where rounding hides no small error.

    Raises:
        ImportError: if Triton is missing. Errors of a compiler or a launch pass through.
    """
    compared = _verify(name, config, dtype, device)
    if dtype.itemsize < torch.float32.itemsize:
        for difference in _verify(name, config, torch.float32, device):
            compared.append(replace(difference, result=f"{difference.result} in float32"))
    return compared


def _verify(name: str, config: Any, dtype: torch.dtype, device: torch.device) -> list[Difference]:
    compared: list[Difference] = []
    for example in examples_of(name, config):
        kernel, reference = (_function(by, name, example) for by in ("triton", "torch"))
        compared += compare(kernel, reference, example, dtype, device)
    return compared


def compare(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    example: Example,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Difference]:
    """Compare the values and gradients of a call on a device with its reference."""
    exact = results(reference, example, torch.float64, CPU, rounded=dtype)
    rounding = results(reference, example, dtype, CPU)
    with _without_tf32():
        ours = results(kernel, example, dtype, device)
        plain = results(reference, example, dtype, device)
    return list(differences(ours, plain, rounding, exact, dtype))


def _function(by: str, name: str, example: Example) -> Callable[..., Any]:
    """A kernel's function by "triton", or by its reference in plain "torch"."""
    if by == "triton":
        return getattr(import_module(f".triton.{name}", __package__), example.function)
    return using_kernels("torch")(getattr(fused, example.function))


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Products in full float32, of functions that contain some."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def results(
    function: Callable[..., Any],
    example: Example,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rounded: torch.dtype | None = None,
) -> Results:
    """Outputs and gradients by name, in float64 on the CPU.

    Args:
        rounded: the arguments are rounded to this dtype first, so that all see the same ones.
    """
    arguments = dict(example.arguments)
    for name, argument in example.arguments.items():
        if not isinstance(argument, Tensor):
            continue
        tensor = argument.to(device)
        if tensor.is_floating_point():
            cast = dtype
            if name in example.kept:
                cast = torch.promote_types(dtype, tensor.dtype)
            else:
                tensor = tensor.to(rounded or dtype)
            tensor = _with_strides(tensor.to(cast), argument.stride())
            tensor.requires_grad_(name in example.gradients)
        arguments[name] = tensor

    with torch.set_grad_enabled(bool(example.gradients)):
        outputs = function(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    called = example.function if example.gradients else f"{example.function} without gradients"
    named = {f"output {i} of {called}": output for i, output in enumerate(outputs)}
    named |= _gradients(example, arguments, outputs)
    return {name: tensor.detach().to(CPU, torch.float64) for name, tensor in named.items()}


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides, which conversions keep of dense tensors alone."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _gradients(example: Example, arguments: dict[str, Any], outputs: tuple[Tensor, ...]) -> Results:
    """The gradients of a random linear function of the outputs."""
    if not example.gradients:
        return {}
    differentiable = [output for output in outputs if output.requires_grad]
    weights = []
    for i, output in enumerate(differentiable):
        # Numbers that bf16 holds exactly: the same ones in every dtype.
        weight = normal(*output.shape, seed=i + 1).bfloat16()
        weight = weight.to(output.device, output.dtype)
        if dims := example.swapped.get(i):
            weight = weight.transpose(*dims).contiguous().transpose(*dims)
        weights.append(weight)

    inputs = [arguments[name] for name in example.gradients]
    gradients = torch.autograd.grad(
        differentiable, inputs, weights, allow_unused=True, materialize_grads=True
    )
    labels = [f"gradient of {name} in {example.function}" for name in example.gradients]
    return dict(zip(labels, gradients, strict=True))


def differences(
    ours: Results, plain: Results, rounding: Results, exact: Results, dtype: torch.dtype
) -> Iterator[Difference]:
    """The largest error of each result.

    Args:
        plain, rounding: of the reference in the same dtype, on the device and on the CPU.
        exact: of the reference in float64.
    """
    floor = NOISE_FLOOR * max(_rms(tensor) for tensor in exact.values())
    least = max(MIN_ERROR, MIN_ROUNDING * torch.finfo(dtype).eps)
    for name, tensor in exact.items():
        scale = max(_rms(tensor), floor) or 1.0
        expected = max(least, _largest(rounding[name] - tensor) / scale)
        # Libraries of a GPU may add the terms of a product one after the other.
        on_device = _largest(plain[name] - tensor) / scale
        if on_device > expected:
            expected = min(on_device, MAX_RATIO * expected)
        yield Difference(name, _largest(ours[name] - tensor) / scale, MAX_RATIO * expected)


def first_line(error: BaseException) -> str:
    """The kind of an error, and the first line of its message that is no heading: messages of
    compilers and of CUDA are pages."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line and not line.endswith(":")), "")
    return f"{type(error).__name__}: {first}"


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item() if tensor.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


# --- kernels of attention


@dataclass(frozen=True, eq=False)
class Case:
    """A call of a model, by what the choice of its kernel depends on and by its arguments."""

    sequences: Sequences
    example: Example


def verify_backend(
    backend: Backend, cases: Iterable[Case], device: torch.device
) -> Iterator[Difference]:
    """Compare a kernel of attention with the definition on a device, call by call."""
    kernel = partial(attention, backend=backend)
    for case in cases:
        yield from compare(kernel, define, case.example, case.sequences.dtype, device)


def cases_of(
    config: Any, lengths: Mapping[str, Collection[int]], dtype: torch.dtype, *, trained: bool
) -> Iterator[Case]:
    """Small calls of each kind of attention, which differ in their lengths.

    Args:
        lengths: of a run's sequences, by kind. The shortest, the longest, and the longest that 128
            does not divide are taken.
        trained: whether gradients are compared, too.
    """
    width = config.hidden_size // config.num_heads

    def case(
        kind: str, label: str, queries: Sequence[int], keys: Sequence[int], *, packed: bool
    ) -> Case:
        scores = sum(q * k for q, k in zip(queries, keys, strict=True))
        heads = max(1, min(config.num_heads, MAX_SCORES // scores))
        arguments: dict[str, Any] = {"lengths": (queries, keys) if packed else None}
        for seed, (name, tokens) in enumerate({"q": queries, "k": keys, "v": keys}.items()):
            shape = (sum(tokens),) if packed else (len(tokens), tokens[0])
            arguments[name] = normal(*shape, heads, width, seed=seed)

        example = Example(
            f"{LABELS[kind]} over {label}", arguments, ("q", "k", "v") if trained else ()
        )
        return Case(Sequences(dtype, width, kind, max(keys), packed), example)

    tokens: tuple[int, ...]
    for kind in ("spatial", "temporal") if config.alternates else ("spatial",):
        for length in _some(lengths[kind]):
            tokens = (length, length)
            yield case(kind, f"{length} tokens", tokens, tokens, packed=False)
        if max(lengths[kind], default=0) > TILE:
            low = case(kind, "low scores", (704, 704), (704, 704), packed=False)
            low.example.arguments["q"][..., 0] = 1.0
            low.example.arguments["k"][..., 0] = LOW_SCORE * width**0.5
            yield low
            tokens = (136,) * MANY_ROWS
            yield case(kind, "many rows", tokens, tokens, packed=False)
        tokens = (405, 1, 131)
        yield case(kind, "rows of 405, 1 and 131 tokens", tokens, tokens, packed=True)

    text = config.model_max_length
    for queries, keys in (
        ((1590, 1590), (text, text)),
        ((405, 0, 131, 64), (text, 7, 1, max(1, text // 2))),
    ):
        label = f"texts of {', '.join(map(str, keys))} tokens"
        yield case("cross", label, queries, keys, packed=True)


def _some(lengths: Collection[int]) -> list[int]:
    """Lengths to compare: of a run, and such that kernels have been wrong at."""
    possible = sorted(min(length, MAX_LENGTH) for length in lengths if length > 1)
    odd = [length for length in possible if length % TILE]
    known = ODD_LENGTHS if possible and possible[-1] > TILE else ()
    return sorted({*possible[:1], *possible[-1:], *odd[-1:], *known})


def define(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None = None) -> Tensor:
    """Attention by its definition, with each result rounded to the dtype of the tensors.

    The arguments are as in ``attention``.
    """
    if lengths is None:
        scores = torch.einsum("rqhd,rkhd->rhqk", q * q.shape[-1] ** -0.5, k)
        return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v)
    samples = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    return torch.cat([define(*(z[None] for z in sample))[0] for sample in samples])
