"""Kernels are verified in the forms in which models call them: dtypes, strides, what is absent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from interpreter import run_interpreted
from random_weights import draw_weights
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_sp.models import attention, build_model, hook_points, layers
from opensora_sp.models.kernels import fused, triton, verification
from opensora_sp.models.kernels.examples import (
    Example,
    examples_of,
    kernel_names,
)
from opensora_sp.models.kernels.verification import CPU, results

Forms = tuple[tuple[str, str], ...]
Calls = dict[str, set["Call"]]


class Call(NamedTuple):
    """The arguments of a call, or the gradients of its results ("of 0"), each with its form."""

    function: str
    forms: Forms


def form_of(value: Any) -> str:
    """Of a tensor its dtype, its place in memory, and of an entry of a modulation what shares it.

    Of other arguments whether they are given.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    entry = ""
    if value.dim() == 4 and value.shape[1:3] != (1, 1) and 1 in value.shape[1:3]:
        entry = ", of tokens" if value.shape[1] == 1 else ", of rows"
    return f"{str(value.dtype).removeprefix('torch.')}, {_place_of(value)}{entry}"


def _place_of(z: Tensor) -> str:
    if z.is_contiguous():
        return "dense"
    if z.dim() > 1 and z.transpose(0, 1).is_contiguous():
        return "across"  # row by row of the other layout
    return "cut out" if z.stride(-1) == 1 else "apart"


def _form(function: str, arguments: dict[str, Any]) -> Call:
    return Call(function, tuple((name, form_of(value)) for name, value in arguments.items()))


class _Seen(torch.autograd.Function):
    """The same tensors; backward shows their gradients."""

    @staticmethod
    def forward(ctx: Any, show: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.show = show
        return tuple(z.view_as(z) for z in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.show(grads)
        return (None, *grads)


def watched(calls: set[Call], function: str, *args: Any, **options: Any) -> Any:
    """Call a function of a reference, and record the call and, in backward, the gradients."""
    reference = getattr(fused, function)
    bound = inspect.signature(reference).bind(*args, **options)
    bound.apply_defaults()
    calls.add(_form(function, bound.arguments))

    def show(grads: tuple[Tensor, ...]) -> None:
        calls.add(_form(function, {f"of {i}": grad for i, grad in enumerate(grads)}))

    with mock.patch.object(fused, "chosen", _none):
        outputs = reference(*args, **options)
    if not isinstance(outputs, tuple):
        return _Seen.apply(show, outputs)[0]
    return _Seen.apply(show, *outputs)


def _none(name: str, like: Tensor) -> bool:
    return False


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """The calls by models inside of the context, by kernel."""
    calls: Calls = {name: set() for name in kernel_names()}

    def chosen(name: str, like: Tensor) -> bool:
        return like.dtype != torch.float64

    with ExitStack() as stack:
        for module in (attention, fused, hook_points, layers):
            stack.enter_context(mock.patch.object(module, "chosen", chosen))
        references = [name for name, member in vars(fused).items() if inspect.isfunction(member)]
        for name in kernel_names():
            functions = {
                function: partial(watched, calls[name], function) for function in references
            }
            fake = SimpleNamespace(**functions)
            stack.enter_context(mock.patch.object(triton, name, fake, create=True))
        yield calls


def calls_of(example: Example, dtype: torch.dtype) -> set[Call]:
    """The calls that an example of a kernel makes when it is verified for this dtype."""
    calls: set[Call] = set()
    results(partial(watched, calls, example.function), example, dtype, CPU)
    return calls


SIZES: Any = SimpleNamespace(hidden_size=48, num_heads=2, mlp_ratio=4.0)
COMMON = dict(hidden_size=48, depth=2, num_heads=2, caption_channels=8, model_max_length=6)
V13 = dict(qk_norm=True, kernel_size=(2, 2, -1), use_spatial_rope=True)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("STDiT", {}),
    ("STDiT2", dict(qk_norm=True)),
    ("STDiT3", dict(qk_norm=True)),
    ("STDiT3", dict(qk_norm=False)),
    ("STDiT3", V13),
]


def step(name: str, options: dict[str, Any], samples: int, frames: int, *, masked: bool) -> None:
    """Forward and backward in bf16, as in a run: of clips or images, with conditioning frames."""
    sizes = dict(input_size=(frames, 4, 4)) if name == "STDiT" else {}
    model = draw_weights(build_model(name, **COMMON, **sizes, **options)).bfloat16()
    numbers: dict[str, Any] = {key: torch.full((samples,), 24.0) for key in model.sample_inputs}
    if masked:
        numbers["x_mask"] = (torch.arange(frames) > 0).expand(samples, -1)

    x, y = torch.randn(samples, 4, frames, 4, 4), torch.randn(samples, 1, 6, 8)
    timestep = torch.full((samples,), 300.0)
    model(x.bfloat16(), timestep, y.bfloat16(), **numbers).square().mean().backward()


@pytest.fixture(scope="module")
def of_models() -> dict[str, set[Call]]:
    with recorded_calls() as calls:
        for (name, options), samples, frames, masked in product(
            MODELS, (1, 2), (1, 3), (False, True)
        ):
            step(name, options, samples, frames, masked=masked)
    return calls


def comparable(calls: set[Call]) -> Iterator[Call]:
    """Without the gradients that attention leaves: on CUDA other kernels do."""
    for call in calls:
        if call.forms[0][0] != "of 0" or not call.function.endswith("qk_norm"):
            yield call


def test_examples_have_all_forms_of_the_models_calls(of_models: dict[str, set[Call]]) -> None:
    for name in kernel_names():
        verified = set.union(*(calls_of(one, torch.bfloat16) for one in examples_of(name, SIZES)))
        missing = sorted(map(str, set(comparable(of_models[name])) - verified))
        assert of_models[name] and not missing, "\n".join(missing)


class Fakes(TorchDispatchMode):
    """Beside each call of a kernel's operator, that of its fake: the results must be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace != "opensora_sp":
            return found

        self.called.add(func._opname)
        with FakeTensorMode() as mode:
            arguments = pytree.tree_map_only(Tensor, mode.from_tensor, args)
            fakes = pytree.tree_leaves(func(*arguments))
        for one, fake in zip(pytree.tree_leaves(found), fakes, strict=True):
            ours, wanted = ((z.dtype, z.shape, z.stride()) for z in (one, fake))
            assert ours == wanted, (func, ours, wanted)
        return found


def operators_like_their_fakes() -> set[str]:
    """The operators called, for the smallest examples, with tokens in bf16 and weights in fp32."""
    seen = Fakes()
    for name in kernel_names():
        examples: dict[tuple[str, tuple[str, ...]], Example] = {}
        for one in sorted(examples_of(name, SIZES), key=size_of):
            if one.gradients:
                given = tuple(key for key, value in one.arguments.items() if value is not None)
                examples.setdefault((one.function, given), one)

        for one in examples.values():
            # Products take one dtype.
            wide = () if "linear" in one.function else ("bias", "q_weight", "k_weight")
            kernel = verification._function("triton", name, one)
            mixed = replace(one, kept=(*one.kept, *wide))
            with seen:
                verification.results(kernel, mixed, torch.bfloat16, verification.CPU)
    return seen.called


def size_of(example: Example) -> int:
    return sum(z.numel() for z in example.arguments.values() if isinstance(z, Tensor))


def test_results_are_like_those_of_the_fakes_by_which_compilers_and_plans_go() -> None:
    """Also where parameters are wider than tokens: a gradient of theirs is as wide, unrounded."""
    called = run_interpreted(operators_like_their_fakes)
    forward = {"norm_modulate", "add_gated", "qk_norm", "gelu", "short_rows"}
    assert called == forward | {f"{name}_backward" for name in forward}
