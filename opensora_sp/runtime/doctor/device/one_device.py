"""Checks of one device: its speed, kernels of attention and of Triton, and every model, small."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.attention_table import KERNELS, NEEDS, Backend, Platform
from opensora_sp.models.attention_table import obstacle as attention_obstacle
from opensora_sp.models.kernels.examples import Sizes, kernel_names
from opensora_sp.models.kernels.verification import (
    Difference,
    cases_of,
    obstacle,
    verify_backend,
    verify_kernel,
)
from opensora_sp.models.registry import CLASSES, REFERENCE, VARIANTS, has_one_size, resolve_config
from opensora_sp.runtime.doctor.probe import median_seconds
from opensora_sp.training.sp_verification import fill_zero_parameters, small_batch

from .findings import Finding, Setup, largest_of, relative_errors

REPEATS = 5
GB, TERA = 1e9, 1e12
# Well below any healthy GPU: PCIe 3 copies 12 GB/s, an A10's memory 600, its cores multiply
# 60 TFLOP/s in practice. On CPU there is no bound.
MIN_ON_GPU = {"host to device": 4.0, "device to device": 100.0, "bf16 matrix product": 20.0}

DTYPES = (torch.float32, torch.bfloat16)
# A device sums in another order than a CPU and has another exp and GELU, so a few times the error
# that the same dtype has on CPU is rounding. The error of sums that are rounded at each addition
# grows with the number of tokens, and is far larger. An error on CPU below MIN_ERROR is raised to
# it, since it is tiny by chance.
MAX_RATIO = 4.0
MIN_ERROR = {torch.float32: 5e-6, torch.bfloat16: 1e-2}

OUTPUT = "the output"
# By name: the output and all gradients.
Step = dict[str, Tensor]


def check_ceilings(setup: Setup) -> Iterator[Finding]:
    """Copies in GB/s (device to device: read and write), and a bf16 matrix product in TFLOP/s."""
    device, on_gpu = setup.device, setup.device.type == "cuda"
    num_bytes, side = (2**22, 256) if setup.small else (2**29, 8192)

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    source = torch.empty_like(host, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)

    def rate_of(work: Callable[[], Any], amount: float) -> float:
        return amount / median_seconds(work, REPEATS, device)

    rates = {
        "host to device": rate_of(lambda: source.copy_(host), num_bytes / GB),
        "device to device": rate_of(lambda: target.copy_(source), 2 * num_bytes / GB),
        "bf16 matrix product": rate_of(lambda: matrix @ matrix, 2 * side**3 / TERA),
    }
    for name, rate in rates.items():
        bound = MIN_ON_GPU[name] if on_gpu else 0.0
        unit = "TFLOP/s" if "product" in name else "GB/s"
        yield Finding(name, rate, bound, unit, at_least=True)


# --- kernels, as a run verifies them, for the widths of XL/2


def check_attention(setup: Setup) -> Iterator[Finding]:
    """Each kernel of attention that can run here, in the calls of a model."""
    platform = Platform.of(setup.device, deterministic=False)
    lengths = {"spatial": [100] if setup.small else [256], "temporal": [16]}
    for name in KERNELS:
        for dtype in DTYPES:
            label = f"attention {name}, {str(dtype).removeprefix('torch.')}"
            cases = []
            for case in cases_of(resolve_config(REFERENCE), lengths, dtype, trained=True):
                if attention_obstacle(name, case.sequences, platform) is None:
                    cases.append(case)
            if not cases:
                yield Finding.skip(label, f"it takes {NEEDS[name]}")
                continue

            try:
                compared = list(verify_backend(Backend(name), cases, setup.device))
            # A kernel may raise anything; others still run.
            except Exception as error:
                yield Finding.of_error(label, error)
                continue
            yield _worst(label, compared)


def check_kernel(name: str, setup: Setup) -> Iterator[Finding]:
    """The worst value or gradient of a Triton kernel in each dtype."""
    reason = "Triton compiles for GPUs"
    if setup.device.type == "cuda":
        reason = obstacle(setup.device) or ""
    if reason:
        yield Finding.skip(f"kernel {name}", reason)
        return

    sizes = Sizes.of(resolve_config(REFERENCE))
    # In bfloat16, which compares in float32, too.
    compared = verify_kernel(name, sizes, torch.bfloat16, setup.device)
    for dtype in ("float32", "bfloat16"):
        in_float32 = dtype == "float32"
        of_dtype = [d for d in compared if d.result.endswith(" in float32") == in_float32]
        yield _worst(f"kernel {name}, {dtype}", of_dtype)


def _worst(label: str, compared: Sequence[Difference]) -> Finding:
    """In multiples of what rounding explains."""
    worst = max(compared, key=lambda difference: difference.ratio)
    return Finding(label, worst.ratio, 1.0, "x rounding", note=str(worst))


# --- models: forward and backward against float64 on CPU


def small_model(name: str, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """A model of two blocks with the head width of XL/2, in float64 on CPU, and inputs for it."""
    # Frames, height, width. The CPU's part of all checks takes a minute on two cores.
    latents = (4, 8, 8) if setup.small else (8, 32, 32)
    cls, options = VARIANTS[name]
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
    return {OUTPUT: output.detach()} | dict(zip(named, gradients, strict=True))


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
    for dtype in DTYPES:
        expected = step_errors(step(*copy_to(cpu, dtype, *rounded)), exact)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            errors = step_errors(step(*copy_to(setup.device, dtype, *rounded)), exact)

        ratios = {key: e / max(MIN_ERROR[dtype], expected[key]) for key, e in errors.items()}
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        note = f"relative error {errors[OUTPUT]:.1e}"
        yield Finding(f"{label}: output", ratios.pop(OUTPUT), MAX_RATIO, "x CPU's", note=note)

        worst, parameter = largest_of(ratios)
        note = f"{parameter}: {errors[parameter]:.1e}, {expected[parameter]:.1e} on CPU"
        yield Finding(f"{label}: {len(ratios)} gradients", worst, MAX_RATIO, "x CPU's", note=note)


def step_errors(result: Step, exact: Step) -> dict[str, float]:
    """Relative errors by name: of the output, and of each gradient."""
    errors = {}
    for names in ([OUTPUT], [name for name in exact if name != OUTPUT]):
        errors |= relative_errors(result, {name: exact[name] for name in names})
    return errors


def check_compiled(setup: Setup) -> Iterator[Finding]:
    """Blocks compiled by ``torch.compile`` against the same blocks in eager mode."""
    dtype = torch.float32 if setup.small else torch.bfloat16
    model, inputs = copy_to(setup.device, dtype, *small_model(REFERENCE, setup))
    expected = step(model, inputs)

    # Inductor would take a minute to compile code that only a GPU runs.
    compile_blocks(model, backend="aot_eager" if setup.small else "inductor")
    errors = step_errors(step(model, inputs), expected)

    # Compiled code rounds less often: fused operators keep fp32 between them.
    bound = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    yield Finding("compiled blocks: output", errors.pop(OUTPUT), bound)
    worst, parameter = largest_of(errors)
    yield Finding("compiled blocks: gradients", worst, bound, note=f"worst: {parameter}")


MODEL_CHECKS = {name: partial(check_model, name) for name in VARIANTS}
KERNEL_CHECKS = {f"kernel {name}": partial(check_kernel, name) for name in kernel_names()}
