"""Whether blocks run compiled: where a small model of the same widths is right on the device."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import torch

from opensora_sp.models import compile_blocks
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.compile import num_graphs
from opensora_sp.models.kernels import current_kernels, selection, using_kernels
from opensora_sp.models.lora import add_same_lora, lora_layers
from opensora_sp.runtime.doctor.device.findings import largest_of
from opensora_sp.runtime.doctor.device.models import copy_to, step, step_errors
from opensora_sp.runtime.versions import installed, source_digest
from opensora_sp.verification import fill_zero_parameters, small_batch

from .verdicts import OK, device_facts, verdicts_of

logger = logging.getLogger(__name__)

# Times the relative error of eager mode in the same dtype. One below MIN_ERROR is tiny by chance.
MAX_RATIO = 4.0
MIN_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
SAMPLES = 2
CPU = torch.device("cpu")
COMPILED, EAGER = "compiled", "eager"
NOT_SET = "compilation is off, or its compiler is not installed"


def choose_compiled(
    model: ConditionedModel, *, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Let the blocks of a model run compiled only if they are verified. Collective.

    A model that is not to be compiled on one rank is compiled on none. On CUDA, a model of one
    block of each kind with the same widths is compared with eager mode and plain torch: its output
    and, if this model is trained, all gradients. If they differ on any rank, all ranks stay in
    eager mode, with a warning. Call it after ``choose_kernels``: compiled blocks contain the
    kernels.

    Returns:
        ``{"blocks": "compiled" or "eager"}``.
    """
    if device.type != "cuda":
        return {"blocks": EAGER if model.compile_backend is None else COMPILED}

    start = time.perf_counter()
    trained = any(parameter.requires_grad for parameter in model.parameters())
    facts = device_facts(device) | {
        "source": source_digest(),
        "dtype": str(dtype),
        "model": type(model).__name__,
        "config": repr(model.config),
        "backend": str(model.compile_backend),
        "trained": trained,
        "adapted layers": sorted(lora_layers(model)),
        # What the graphs contain.
        "kernels": _kernels_in_use(dtype),
        "cuDNN": torch.backends.cudnn.version(),
        **{name: installed(name) for name in ("flash-attn", "flash-attn-3")},
    }

    def check() -> str:
        # Another rank may have a compiler, and wait for this one.
        if model.compile_backend is None:
            return NOT_SET
        return compare(model, dtype, device, trained=trained)

    (verdict,) = verdicts_of({"compiled blocks": check}, facts, device).values()
    if verdict == OK:
        logger.info("compiled blocks: verified in %.1f s", time.perf_counter() - start)
        return {"blocks": COMPILED}

    model.compile_backend = None
    if verdict != NOT_SET:
        logger.warning(
            "blocks run in eager mode instead of compiled (%s): results stay right, steps take "
            "longer; report it with the output of opensora-sp doctor --device cuda, or set "
            "compile=None",
            verdict,
        )
    return {"blocks": EAGER}


def _kernels_in_use(dtype: torch.dtype) -> list[str]:
    """The setting, and the Triton kernels that are verified for a dtype."""
    verified = (name for name, dtypes in selection._verified.items() if dtype in dtypes)
    return [current_kernels(), *sorted(verified)]


def compare(
    model: ConditionedModel, dtype: torch.dtype, device: torch.device, *, trained: bool
) -> str:
    """OK, or how compiled blocks differ from eager mode, on a small model like this one.

    Both are compared with float64 on the CPU: compiled blocks may have a few times the error that
    eager mode has in the same dtype.
    """
    rounded = copy_to(CPU, dtype, *_small(model, device))
    small, inputs = copy_to(device, dtype, *rounded)
    run = step if trained else _output

    with using_kernels("torch"):
        exact = run(*copy_to(CPU, torch.float64, *rounded))
        eager = step_errors(run(small, inputs), exact)
    assert model.compile_backend is not None
    compile_blocks(small, backend=model.compile_backend)
    # Graphs of an earlier model of the same form would be taken as they are.
    torch._dynamo.reset()
    before = num_graphs()
    found = step_errors(run(small, inputs), exact)
    if num_graphs() == before:
        return "nothing was compiled: torch.compile is disabled, or suppresses its errors"

    ratios = {name: error / max(MIN_ERROR[dtype], eager[name]) for name, error in found.items()}
    worst, name = largest_of(ratios)
    if worst <= MAX_RATIO:
        return OK
    return (
        f"they differ in {name}: a relative error of {found[name]:.2g}, of {eager[name]:.2g} in "
        "eager mode"
    )


def _small(
    model: ConditionedModel, device: torch.device
) -> tuple[ConditionedModel, dict[str, Any]]:
    """A model of one block of each kind with the same widths in float64, and inputs for it."""
    patch = model.config.patch_size
    latents = (4 * patch[0], 4 * patch[1], 6 * patch[2])
    changes: dict[str, Any] = {"depth": 1, "input_size": latents, "skip_y_embedder": False}
    # A config may name a Triton kernel, which the expected run does without.
    changes["attention"] = "auto"
    names = {field.name for field in dataclasses.fields(model.config)}
    config = dataclasses.replace(
        model.config, **{name: value for name, value in changes.items() if name in names}
    )

    # Later draws of the run stay what they are.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        small = type(model)(config).double()
        fill_zero_parameters(small, std=0.1)
        add_same_lora(small, model)
        fill_zero_parameters(small, std=0.1)
    return small, small_batch(small, (SAMPLES, *latents))


@torch.no_grad()
def _output(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output without gradients, as in sampling."""
    return model(**inputs), {}
