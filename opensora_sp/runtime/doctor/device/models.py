"""Every model, small, forward and backward on the device against float64 on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.verification import small_batch

from .findings import NOISE_FLOOR, Finding, Setup, largest_of, relative_error, worst_error

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "STDiT": ("STDiT", {}),
    "STDiT2": ("STDiT2", dict(qk_norm=True)),
    "STDiT3": ("STDiT3", {}),
    "STDiT3 with windows": ("STDiT3", dict(kernel_size=(4, 4, -1))),
}

# A device sums in another order than a CPU, and its exp and GELU are others: a few times the error
# that the same dtype has on CPU is rounding. Sums that are themselves rounded, add after add, grow
# with the number of tokens and are far beyond. Errors count as at least the dtype's here, so that
# one that happens to be tiny on CPU is no measure.
TIMES_CPU = 4.0
LEAST_ERROR = {torch.float32: 5e-6, torch.bfloat16: 1e-2}

OUTPUT = "the output"
Step = tuple[Tensor, dict[str, Tensor]]


def small(name: str, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """A model of two blocks with heads as wide as XL/2's, in float64 on CPU, and inputs for it."""
    latents = (4, 8, 8) if setup.small else (16, 32, 32)  # frames, height, width
    cls, options = MODELS[name]
    if cls == "STDiT":
        options = options | dict(input_size=latents)

    torch.manual_seed(0)
    model = build_model(
        cls,
        hidden_size=144,
        depth=2,
        num_heads=2,
        caption_channels=32,
        model_max_length=20,
        **options,
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            # STDiT begins with zeros, behind which everything else would be hidden.
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.1)
    return model, small_batch(model, (2, *latents))


def step(model: Any, inputs: dict[str, Any]) -> Step:
    """The output and all gradients of a weighted sum of it."""
    output = model(**inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        (output * weights).sum() / weights.numel(), list(named.values())
    )
    return output.detach(), dict(zip(named, gradients, strict=True))


def on(
    device: torch.device, dtype: torch.dtype, model: Any, inputs: dict[str, Any]
) -> tuple[Any, Any]:
    """Copies of a model and of its inputs; the timestep and sizes keep more digits than bf16 has."""
    kept = {"timestep", *model.sample_inputs}
    wide = torch.promote_types(dtype, torch.float32)

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "mask":
            return value  # lengths of texts, which the host reads
        if not value.is_floating_point():
            return value.to(device)
        return value.to(device, wide if name in kept else dtype)

    copied = {name: moved(name, value) for name, value in inputs.items()}
    return copy.deepcopy(model).to(device, dtype), copied


def check_model(name: str, setup: Setup) -> Iterator[Finding]:
    """In fp32 and bf16: the output, and the worst of all parameters' gradients."""
    model, inputs = small(name, setup)
    cpu = torch.device("cpu")

    for dtype, least in LEAST_ERROR.items():
        # Both sides begin with the same rounded weights and inputs.
        rounded = on(cpu, dtype, model, inputs)
        exact = errors_of(step(*on(cpu, torch.float64, *rounded)))
        expected = exact(step(*rounded))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found = exact(step(*on(setup.device, dtype, model, inputs)))

        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        ratios = {key: error / max(least, expected[key]) for key, error in found.items()}
        output = found.pop(OUTPUT)
        note = f"relative error {output:.1e}"
        yield Finding(f"{label}: output", ratios.pop(OUTPUT), TIMES_CPU, "x CPU's", note=note)

        worst, parameter = largest_of(ratios)
        note = (
            f"{parameter}: relative error {found[parameter]:.1e}, {expected[parameter]:.1e} on CPU"
        )
        yield Finding(f"{label}: {len(ratios)} gradients", worst, TIMES_CPU, "x CPU's", note=note)


def errors_of(exact: Step) -> Callable[[Step], dict[str, float]]:
    """Measures relative errors by name: of the output, and of each gradient."""
    output, gradients = exact
    floor = NOISE_FLOOR * max(gradient.norm().item() for gradient in gradients.values())

    def measure(found: Step) -> dict[str, float]:
        errors = {
            name: relative_error(found[1][name], one, floor) for name, one in gradients.items()
        }
        return {OUTPUT: relative_error(found[0], output), **errors}

    return measure


def check_compiled(setup: Setup) -> Iterator[Finding]:
    """Blocks compiled by ``torch.compile`` against the same blocks in eager mode."""
    dtype = torch.float32 if setup.small else torch.bfloat16
    model, inputs = on(setup.device, dtype, *small("STDiT3", setup))
    expected = step(model, inputs)

    # Inductor takes a minute for code that only a GPU would run.
    compile_blocks(model, backend="aot_eager" if setup.small else "inductor")
    found = step(model, inputs)

    # Compiled code rounds less often: what is fused stays in fp32.
    bound = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    yield Finding("compiled blocks: output", relative_error(found[0], expected[0]), bound)
    worst, parameter = worst_error(found[1], expected[1])
    yield Finding("compiled blocks: gradients", worst, bound, note=f"the worst: {parameter}")


MODEL_CHECKS: dict[str, Callable[[Setup], Iterator[Finding]]] = {
    name: partial(check_model, name) for name in MODELS
}
