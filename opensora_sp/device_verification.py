"""Kernels, of Triton and of attention, run on a device after their results were compared there.

Nothing that has never run on a device is trusted: its values and gradients are compared with plain
torch on a small batch when a run starts (``models/kernels/verification.py``). All ranks take the
same verdict. A file remembers what has passed, so that the next run on this kind of device starts
at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.common.files import atomic_write, read_json
from opensora_sp.compile_cache import cache_folder, use_triton_cache
from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.attention import choose_backends, set_refused
from opensora_sp.models.attention_table import (
    KERNELS,
    KINDS,
    LABELS,
    Backend,
    Platform,
    names_by_kind,
)
from opensora_sp.models.kernels import Kernels, check_kernels, set_kernels
from opensora_sp.models.kernels.examples import Sizes, kernel_names
from opensora_sp.models.kernels.fused import INTERPRETED, set_verified
from opensora_sp.models.kernels.verification import (
    OBSTACLES,
    Case,
    cases_of,
    obstacle,
    verify_backend,
    verify_kernel,
)
from opensora_sp.parallel.agreement import gathered
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.runtime.rank_info import installed, source_digest

__all__ = ["choose_attention", "choose_kernels", "warn_of_changes"]

logger = logging.getLogger(__name__)

TRITON, TORCH = "triton", "torch"

OK = "ok"
# OK or why it may not run, by name.
Verdicts = dict[str, str]
Facts = dict[str, Any]

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
    sizes = Sizes.of(model.config)
    facts = device_facts(device) | {"dtype": str(dtype), "sizes": vars(sizes)}
    checks = {name: partial(_check_kernel, name, sizes, dtype, device) for name in names}
    verdicts = verdicts_of(checks, facts, device)
    refused = {name: verdict for name, verdict in verdicts.items() if verdict != OK}
    if kernels == TRITON and refused:
        reasons = "; ".join(f"{name}: {verdict}" for name, verdict in refused.items())
        raise ValueError(
            f"got kernels='triton', and kernels that are not verified ({reasons}); "
            "expected the values and gradients of plain torch; set kernels='auto', which replaces "
            "these, and report it with the output of opensora-sp doctor --device cuda"
        )

    set_kernels(kernels)
    for name, verdict in verdicts.items():
        set_verified(name, [dtype] if verdict == OK else [])
        # A machine that cannot run them is no fault; one among others is.
        if verdict not in (OK, *OBSTACLES):
            logger.warning(
                "kernel %s is replaced by plain torch (%s): results stay right, steps take "
                "longer; report it with the output of opensora-sp doctor --device cuda, or set "
                "kernels='torch'",
                name,
                verdict,
            )

    used = {name: TORCH if name in refused else TRITON for name in names}
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


def _check_kernel(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> str:
    if reason := obstacle(device):
        return reason
    compared = verify_kernel(name, sizes, dtype, device)
    return next((str(difference) for difference in compared if not difference.ok), OK)


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
        dtype: of its tokens.

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
    facts = device_facts(device) | {
        "dtype": str(dtype),
        "attention": names,
        "heads": [model.config.num_heads, model.config.hidden_size],
        "lengths": lengths,
        "trained": trained,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "platform": str(Platform.of(device, deterministic=False)),
        "packages": [installed("flash-attn"), installed("flash-attn-3")],
    }

    # Reasons by kernel.
    refused: dict[str, str] = {}
    while failed := _failed(cases, names, facts | {"refused": sorted(refused)}, device):
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

    if refused:
        logger.warning(
            "kernels of attention are replaced by others (%s): results stay right, steps may take "
            "longer; report it with the output of opensora-sp doctor --device cuda",
            "; ".join(f"{KERNELS[name]}: {reason}" for name, reason in refused.items()),
        )
    logger.info("attention: verified in %.1f s", time.perf_counter() - start)


def _failed(
    cases: Collection[Case], names: Mapping[str, str], facts: Facts, device: torch.device
) -> Verdicts:
    """The kernels that would run now and are not right, and why. Collective."""
    kernel_cases: dict[str, list[Case]] = defaultdict(list)
    backends: dict[str, Backend] = {}
    for case in cases:
        kind = case.sequences.kind
        assert kind is not None
        backend = getattr(choose_backends(names, {kind: case.sequences}, device), kind)
        if backend.name not in VERIFIED_ELSEWHERE:
            kernel_cases[backend.name].append(case)
            backends[backend.name] = backend

    # Ranks of other machines may have other packages.
    local_kernels = dict.fromkeys(kernel_cases, "taken")
    rank_kernels = gathered(local_kernels, None) if dist.is_initialized() else {0: local_kernels}
    checks = {}
    for name in sorted(set().union(*rank_kernels.values())):
        backend = backends.get(name) or Backend(name, 1, facts["deterministic"])
        checks[name] = partial(_check_backend, backend, kernel_cases.get(name, cases), device)

    verdicts = verdicts_of(checks, facts, device)
    return {name: verdict for name, verdict in verdicts.items() if verdict != OK}


def _check_backend(backend: Backend, cases: Collection[Case], device: torch.device) -> str:
    return verify_backend(backend, cases, device) or OK


def run_lengths(cfg: TrainConfig | InferenceConfig, config: Any) -> dict[str, list[int]]:
    """Tokens of the sequences of a run's batches, ascending, by kind of attention."""
    lengths: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for batch in batches_by_name(cfg).values():
        size = planned_latent_size(cfg.vae, batch.num_frames, *batch.image_size)
        for kind, sequences in config.sequences(config.grid(1, size), torch.float32).items():
            lengths[kind].add(sequences.length or 1)
    return {kind: sorted(lengths[kind]) for kind in KINDS}


# --- verdicts: found by checks, kept in a file, agreed by all ranks


def device_facts(device: torch.device) -> Facts:
    """What the results of compiled code depend on: the source, the device and the compilers."""
    return {
        "source": source_digest(),
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "triton": installed("triton"),
    }


def verdicts_of(
    checks: Mapping[str, Callable[[], str]], facts: Facts, device: torch.device
) -> Verdicts:
    """The verdicts that all ranks agree on. Collective: each rank calls it, also one that lacks
    what a check needs, and lets the check say so.

    Args:
        checks: by name, return OK or why it may not run. One that passed before with the same facts
            is not called.

    Raises:
        ValueError: if a check leaves the device unusable, as an illegal access does.
    """
    passed = read_passed(facts)
    verdicts = {
        name: OK if name in passed else _verdict(name, check, device)
        for name, check in checks.items()
    }
    now_passed = {name for name, verdict in verdicts.items() if verdict == OK}
    # Interpreted kernels say nothing about compiled ones.
    if now_passed > passed and not INTERPRETED:
        write_passed(facts, now_passed)
    return agreed(verdicts)


def _verdict(name: str, check: Callable[[], str], device: torch.device) -> str:
    try:
        return check()
    # Compilers and drivers may raise anything.
    except Exception as error:
        _check_device(name, device, error)
        return f"it could not be compared: {_first_line(error)}"


def _check_device(name: str, device: torch.device, error: Exception) -> None:
    """Raise ValueError if the device computes nothing any more; a run's watchdog ends its peers."""
    try:
        torch.zeros(1, device=device).item()
    except torch.cuda.OutOfMemoryError:
        # A RuntimeError as well, of a device that is full.
        pass
    except RuntimeError:
        raise ValueError(
            f"got an error from {name} ({_first_line(error)}), after which the device computes "
            "nothing; expected code that runs; set kernels='torch', and report it "
            "with the output of opensora-sp doctor"
        ) from error


def _first_line(error: Exception) -> str:
    """Messages of compilers and of CUDA are pages, some with a heading."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line and not line.endswith(":")), "")
    return f"{type(error).__name__}: {first}"


def agreed(verdicts: Verdicts) -> Verdicts:
    """By name the verdict of all ranks, or where they differ the first but OK. Collective."""
    if not dist.is_initialized():
        return verdicts

    rank_verdicts = gathered(verdicts, None)
    result = {}
    for name in verdicts:
        by_rank = {rank: rank_verdicts[rank][name] for rank in rank_verdicts}
        result[name] = by_rank[0]
        if len(set(by_rank.values())) > 1:
            rank = next(rank for rank, verdict in by_rank.items() if verdict != OK)
            result[name] = f"on rank {rank}: {by_rank[rank]}"
    return result


def _file_of(facts: Facts) -> Path:
    """In the user's cache folder.

    Raises:
        OSError: for a user who has none.
    """
    if (folder := cache_folder()) is None:
        raise FileNotFoundError("the user has no home folder")
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "verified" / f"{key}.json"


def read_passed(facts: Facts) -> set[str]:
    """The names that passed before with the same facts; of a missing or damaged file none."""
    try:
        return set(read_json(_file_of(facts))["passed"])
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def write_passed(facts: Facts, passed: Collection[str]) -> None:
    """Remember what has passed. What has not is checked again by the next run."""
    try:
        path = _file_of(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps({"passed": sorted(passed), "facts": facts}, indent=1))
    except OSError as error:
        logger.info("what was verified is not remembered: %s", error)
