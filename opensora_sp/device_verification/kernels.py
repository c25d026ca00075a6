"""Which kernels a run takes: Triton's, where they are verified, or plain torch."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opensora_sp.compile_cache import use_triton_cache
from opensora_sp.models import kernels as kernels_package
from opensora_sp.models.kernels import Kernels, check_kernels, selection, set_kernels
from opensora_sp.models.kernels.examples import Sizes, kernel_names
from opensora_sp.models.kernels.verification import OBSTACLES, obstacle, verify_kernel

from .verdicts import OK, Verdicts, device_facts, verdicts_of

logger = logging.getLogger(__name__)

TRITON, TORCH = "triton", "torch"


def choose_kernels(
    kernels: Kernels, model: Any, *, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Set which kernels this process takes, the same on all ranks. Collective.

    Logs the choice, and a warning for each kernel that plain torch replaces.

    Args:
        kernels: "auto" takes the Triton kernels that are verified, "triton" takes all of them and
            requires that they are, "torch" takes none.
        model: an STDiT model, whose widths are verified.
        dtype: of its tokens.

    Returns:
        "triton" or "torch" for each kernel.

    Raises:
        ValueError: on every rank, with "triton", if there is no CUDA device, if the dtype is
            float64, or if Triton is missing or a kernel differs from its reference on any rank.
    """
    check_kernels(kernels, device.type, dtype)
    names = kernel_names()
    if reason := _reason_to_verify_none(kernels, dtype, device):
        set_kernels(kernels)
        is_interpreted = kernels == TRITON and device.type != "cuda"
        return _logged(dict.fromkeys(names, TRITON if is_interpreted else TORCH), reason)

    start = time.perf_counter()
    use_triton_cache()
    verdicts = verify_kernels(names, Sizes.of(model.config), dtype, device)
    if kernels == TRITON:
        _require(verdicts)
    set_kernels(kernels)
    for name, verdict in verdicts.items():
        selection.set_verified(name, [dtype] if verdict == OK else [])
        # A machine that cannot run them is no fault; one among others is.
        if verdict not in (OK, *OBSTACLES):
            logger.warning(
                "kernel %s is replaced by plain torch (%s): results stay right, steps take "
                "longer; report it with the output of opensora-sp doctor --device cuda, or set "
                "kernels='torch'",
                name,
                verdict,
            )

    used = {name: TRITON if verdict == OK else TORCH for name, verdict in verdicts.items()}
    (verdict, *others) = set(verdicts.values())
    if verdict in OBSTACLES and not others:
        return _logged(used, verdict)
    return _logged(used, f"verified in {time.perf_counter() - start:.1f} s")


def _reason_to_verify_none(kernels: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why the choice needs no verdicts; empty if it does. The same on all ranks."""
    if kernels == TORCH:
        return "as asked for"
    if device.type != "cuda":
        return "interpreted" if kernels == TRITON else f"the device is {device.type}"
    if dtype == torch.float64:
        return "they compute in float32"
    return ""


def verify_kernels(
    names: list[str], sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Verdicts:
    """The verdicts on kernels for a model's widths, the same on all ranks. Collective."""

    def check(name: str) -> str:
        if reason := obstacle(device):
            return reason
        for difference in verify_kernel(name, sizes, dtype, device):
            if not difference.ok:
                return str(difference)
        return OK

    facts = device_facts(device) | {
        "source": source_digest(),
        "dtype": str(dtype),
        "sizes": vars(sizes),
    }
    return verdicts_of({name: partial(check, name) for name in names}, facts, device)


def _require(verdicts: Verdicts) -> None:
    refused = [f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict != OK]
    if refused:
        raise ValueError(
            f"got kernels='triton', and kernels that are not verified ({'; '.join(refused)}); "
            "expected the values and gradients of plain torch; set kernels='auto', which replaces "
            "these, and report it with the output of opensora-sp doctor --device cuda"
        )


def _logged(used: dict[str, str], reason: str) -> dict[str, str]:
    by_triton = [name for name, by in used.items() if by == TRITON]
    what = f"{', '.join(by_triton)} by Triton" if by_triton else "plain torch"
    logger.info("kernels: %s (%s)", what, reason)
    return used


def warn_of_changes(before: dict[str, str] | None, now: dict[str, str]) -> None:
    """Warn if a run resumes with other kernels than its checkpoint's, which round otherwise.

    Args:
        before: "triton" or "torch" for each kernel, in the checkpoint; None in older checkpoints.
        now: as ``before``, in this run.
    """
    there = before or {}
    changed = [name for name, used in now.items() if there.get(name, used) != used]
    if changed:
        logger.warning(
            "the run resumes with other kernels than its checkpoint was written with: %s; its "
            "losses may differ from the uninterrupted run's in the last digits; resume on "
            "the same kind of device, or set kernels='torch' for the whole run",
            ", ".join(f"{name} by {now[name]} (there by {there[name]})" for name in changed),
        )


def source_digest() -> str:
    """Sixteen hex digits of the SHA-256 of the kernels' source files."""
    hashed = hashlib.sha256()
    folder = Path(kernels_package.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        hashed.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]
