"""Every model, small, forward and backward on the device against float64 on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.registry import CLASSES, REFERENCE, VARIANTS, has_one_size
from opensora_sp.training.sp_verification import fill_zero_parameters, small_batch

from .measurements import Finding, Setup, largest_of, relative_error, relative_errors

MODELS = VARIANTS

# A device sums in another order than a CPU and has another exp and GELU, so a few times the error
# that the same dtype has on CPU is rounding. The error of sums that are rounded at each addition
# grows with the number of tokens, and is far larger. An error on CPU below MIN_ERROR is raised to
# it, since it is tiny by chance.
MAX_RATIO = 4.0
MIN_ERROR = {torch.float32: 5e-6, torch.bfloat16: 1e-2}

OUTPUT = "the output"
Step = tuple[Tensor, dict[str, Tensor]]


def small_model(name: str, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """A model of two blocks with the head width of XL/2, in float64 on CPU, and inputs for it."""
    # Frames, height, width. The CPU's part of all checks takes a minute on two cores.
    latents = (4, 8, 8) if setup.small else (8, 32, 32)
    cls, options = MODELS[name]
    if has_one_size(CLASSES[cls]):
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
    fill_zero_parameters(model, std=0.1)
    return model, small_batch(model, (2, *latents))


def step(model: Any, inputs: dict[str, Any]) -> Step:
    """The output and all gradients of a weighted sum of it."""
    output = model(**inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = (output * weights).sum() / weights.numel()
    gradients = torch.autograd.grad(loss, list(named.values()))
    return output.detach(), dict(zip(named, gradients, strict=True))


def copy_to(
    device: torch.device, dtype: torch.dtype, model: Any, inputs: dict[str, Any]
) -> tuple[Any, Any]:
    """Copies of a model and its inputs; timesteps and sizes are never rounded to bf16."""
    kept = {"timestep", *model.sample_inputs}
    wide = torch.promote_types(dtype, torch.float32)

    def moved(name: str, argument: Any) -> Any:
        # The host reads the lengths of texts from the mask.
        if not isinstance(argument, Tensor) or name == "mask":
            return argument
        if not argument.is_floating_point():
            return argument.to(device)
        return argument.to(device, wide if name in kept else dtype)

    copied = {name: moved(name, argument) for name, argument in inputs.items()}
    return copy.deepcopy(model).to(device, dtype), copied


def check_model(name: str, setup: Setup) -> Iterator[Finding]:
    """In fp32 and bf16: the output, and the worst of all parameters' gradients."""
    model, inputs = small_model(name, setup)
    cpu = torch.device("cpu")

    # All start from the same weights and inputs, which every dtype holds.
    rounded = copy_to(cpu, torch.bfloat16, model, inputs)
    exact = step(*copy_to(cpu, torch.float64, *rounded))
    for dtype, min_error in MIN_ERROR.items():
        expected = step_errors(step(*copy_to(cpu, dtype, *rounded)), exact)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            errors = step_errors(step(*copy_to(setup.device, dtype, *rounded)), exact)

        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        ratios = {key: error / max(min_error, expected[key]) for key, error in errors.items()}
        output = errors.pop(OUTPUT)
        note = f"relative error {output:.1e}"
        yield Finding(f"{label}: output", ratios.pop(OUTPUT), MAX_RATIO, "x CPU's", note=note)

        worst, parameter = largest_of(ratios)
        note = (
            f"{parameter}: relative error {errors[parameter]:.1e}, {expected[parameter]:.1e} on CPU"
        )
        yield Finding(f"{label}: {len(ratios)} gradients", worst, MAX_RATIO, "x CPU's", note=note)


def step_errors(result: Step, exact: Step) -> dict[str, float]:
    """Relative errors by name: of the output, and of each gradient."""
    return {OUTPUT: relative_error(result[0], exact[0]), **relative_errors(result[1], exact[1])}


def check_compiled(setup: Setup) -> Iterator[Finding]:
    """Blocks compiled by ``torch.compile`` against the same blocks in eager mode."""
    dtype = torch.float32 if setup.small else torch.bfloat16
    model, inputs = copy_to(setup.device, dtype, *small_model(REFERENCE, setup))
    expected = step(model, inputs)

    # Inductor would take a minute to compile code that only a GPU runs.
    compile_blocks(model, backend="aot_eager" if setup.small else "inductor")
    output, gradients = step(model, inputs)

    # Compiled code rounds less often: fused operators keep fp32 between them.
    bound = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    yield Finding("compiled blocks: output", relative_error(output, expected[0]), bound)
    worst, parameter = largest_of(relative_errors(gradients, expected[1]))
    yield Finding("compiled blocks: gradients", worst, bound, note=f"worst: {parameter}")


MODEL_CHECKS: dict[str, Callable[[Setup], Iterator[Finding]]] = {
    name: partial(check_model, name) for name in MODELS
}
