"""Kernels, of Triton and of attention, run on a device after their results were compared there.

Nothing that has never run on a device is trusted: its values and gradients are compared with plain
torch on a small batch when a run starts (``models/kernels/verification.py``). All ranks take the
same verdict.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.attention import choose_backends, set_refused
from opensora_sp.models.attention_table import KERNELS, KINDS, LABELS, Backend, names_by_kind
from opensora_sp.models.kernels.examples import kernel_names
from opensora_sp.models.kernels.fused import Kernels, check_kernels, set_kernels, set_verified
from opensora_sp.models.kernels.verification import (
    OBSTACLES,
    Case,
    Difference,
    cases_of,
    first_line,
    obstacle,
    verify_backend,
    verify_kernel,
)
from opensora_sp.parallel.agreement import gathered

__all__ = ["choose_attention", "choose_kernels"]

logger = logging.getLogger(__name__)

TRITON, TORCH = "triton", "torch"

OK, NOT_TAKEN = "ok", "its ranks take another"
# OK or why it may not run, by name.
Verdicts = dict[str, str]

# The one is verified as a Triton kernel, the other is the definition.
VERIFIED_ELSEWHERE = ("short_rows", "reference")


# --- Triton kernels


def choose_kernels(
    kernels: Kernels, model: Any, *, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Set which kernels this process takes, the same on all ranks. Collective.

    Logs the choice, and a warning for each kernel that plain torch replaces.

    Args:
        kernels: "auto" takes the Triton kernels that are verified, "triton" takes all of them and
            requires that they are, "torch" takes none.
        model: an STDiT model, whose widths are verified.

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

    local_verdicts, problem, start = {}, obstacle(device), time.perf_counter()
    for name in names:
        compare = partial(verify_kernel, name, model.config, dtype, device)
        local_verdicts[name] = problem or _verdict(name, compare, device)
    verdicts = agreed(local_verdicts)
    refused = {name: verdict for name, verdict in verdicts.items() if verdict != OK}
    if kernels == TRITON and refused:
        reasons = "; ".join(f"{name}: {verdict}" for name, verdict in refused.items())
        raise ValueError(
            f"got kernels='triton', and kernels that are not verified ({reasons}); "
            "expected the values and gradients of plain torch; set kernels='auto', which replaces "
            "these, and report it with the output of opensora-sp doctor --device cuda"
        )

    set_kernels(kernels)
    for name in names:
        set_verified(name, [] if name in refused else [dtype])
    # A machine that cannot run them is no fault; one among others is.
    _warn_of_replaced({n: verdict for n, verdict in refused.items() if verdict not in OBSTACLES})

    used = {name: TORCH if name in refused else TRITON for name in names}
    taken = f"verified in {time.perf_counter() - start:.1f} s"
    return _logged(used, problem if problem and {problem} == {*verdicts.values()} else taken)


def _reason_to_verify_none(kernels: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why the choice needs no verdicts; empty if it does. The same on all ranks."""
    if kernels == TORCH:
        return "as asked for"
    if device.type != "cuda":
        return "interpreted" if kernels == TRITON else f"the device is {device.type}"
    if dtype == torch.float64:
        return "they compute in float32"
    return ""


def _warn_of_replaced(refused: Verdicts) -> None:
    if refused:
        logger.warning(
            "kernels are replaced by others (%s): results stay right, steps may take longer; "
            "report it with the output of opensora-sp doctor --device cuda",
            "; ".join(f"{KERNELS.get(name, name)}: {reason}" for name, reason in refused.items()),
        )


def _logged(used: dict[str, str], reason: str) -> dict[str, str]:
    by_triton = [name for name, by in used.items() if by == TRITON]
    what = f"{', '.join(by_triton)} by Triton" if by_triton else "plain torch"
    logger.info("kernels: %s (%s)", what, reason)
    return used


# --- kernels of attention


def choose_attention(
    cfg: TrainConfig | InferenceConfig, model: Any, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Leave out kernels of attention that are not right on a device, on all ranks. Collective.

    The kernel that the table chooses for each kind of attention (``models/attention_table.py``) is
    compared with the definition at the head width and lengths of the run. After one that differs
    or raises an error, the next row of the table is compared. Logs a warning if there are any. Call
    it after ``choose_kernels``, which decides on the Triton kernel for short rows.

    Args:
        model: an STDiT model, of whose parameters some are trained in a training run.

    Raises:
        ValueError: on every rank, if the config names a kernel that is not right.
    """
    set_refused(())
    if device.type == "cpu":
        return

    start = time.perf_counter()
    names = names_by_kind(model.config.attention)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    lengths = run_lengths(cfg, model.config)
    cases = list(cases_of(model.config, lengths, dtype, trained=trained))

    # Reasons by kernel.
    refused: Verdicts = {}
    while failed := _failed(cases, names, device):
        refused |= failed
        set_refused(refused)
        for kind, name in names.items():
            if name in failed:
                raise ValueError(
                    f"got attention {name!r} for {LABELS[kind]}, which is not right on this "
                    f"device ({failed[name]}); expected the values and gradients of its "
                    "definition; set attention='auto', which takes another kernel, and report it "
                    "with the output of opensora-sp doctor --device cuda"
                )

    _warn_of_replaced(refused)
    logger.info("attention: verified in %.1f s", time.perf_counter() - start)


def _failed(cases: Iterable[Case], names: Mapping[str, str], device: torch.device) -> Verdicts:
    """The kernels that would run now and are not right, and why. Collective."""
    kernel_cases: dict[Backend, list[Case]] = defaultdict(list)
    for case in cases:
        kind = case.sequences.kind
        assert kind is not None
        backend = choose_backends(names, {kind: case.sequences}, device)[kind]
        if backend.name not in VERIFIED_ELSEWHERE:
            kernel_cases[backend].append(case)

    verdicts = {}
    for backend, taken_cases in kernel_cases.items():
        compare = partial(verify_backend, backend, taken_cases, device)
        verdicts[backend.name] = _verdict(backend.name, compare, device)
    return {name: verdict for name, verdict in agreed(verdicts).items() if verdict != OK}


def run_lengths(cfg: TrainConfig | InferenceConfig, config: Any) -> dict[str, list[int]]:
    """Tokens of the sequences of a run's batches, ascending, by kind of attention."""
    lengths: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for batch in cfg.batches().values():
        size = planned_latent_size(cfg.vae, batch.num_frames, *batch.image_size)
        for kind, sequences in config.sequences(config.grid(1, size), torch.float32).items():
            lengths[kind].add(sequences.length or 1)
    return {kind: sorted(lengths[kind]) for kind in KINDS}


# --- verdicts: found by checks, agreed by all ranks


def _verdict(name: str, compare: Callable[[], Iterable[Difference]], device: torch.device) -> str:
    """OK, or the first difference or error.

    Raises:
        ValueError: if the device computes nothing any more, as after an illegal access. The run's
            watchdog ends the other ranks.
    """
    try:
        return next((str(difference) for difference in compare() if not difference.ok), OK)
    # Compilers and drivers may raise anything.
    except Exception as error:
        _check_device(name, device, error)
        return f"it could not be compared: {first_line(error)}"


def _check_device(name: str, device: torch.device, error: Exception) -> None:
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        raise ValueError(
            f"got an error from {name} ({first_line(error)}), after which the device computes "
            "nothing; expected code that runs; set kernels='torch', and report it with the output "
            "of opensora-sp doctor"
        ) from error


def agreed(verdicts: Verdicts) -> Verdicts:
    """By name the verdict of all ranks, or where they differ the first but OK. Collective."""
    if not dist.is_initialized():
        return verdicts

    rank_verdicts = gathered(verdicts, None)
    result = {}
    for name in sorted(set().union(*rank_verdicts.values())):
        by_rank = {rank: rank_verdicts[rank].get(name, NOT_TAKEN) for rank in rank_verdicts}
        result[name] = by_rank[0]
        if len(set(by_rank.values())) > 1:
            rank = next(rank for rank, verdict in by_rank.items() if verdict != OK)
            result[name] = f"on rank {rank}: {by_rank[rank]}"
    return result
