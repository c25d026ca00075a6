"""Which kernels a run takes: verified on the device of each rank, and the same on all ranks.

No Triton kernel runs on a device before its values and gradients there were compared with the
reference, for the dtype and the widths of the model. A file remembers what has passed, so that the
next run on this kind of device starts at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .data.atomic import atomic_write
from .models import kernels as kernels_package
from .models.kernels import Kernels, selection, set_kernels
from .models.kernels.examples import Sizes, kernel_names
from .models.kernels.verification import verify_kernel
from .parallel.agreement import gathered
from .runtime.versions import ABSENT, installed

logger = logging.getLogger(__name__)

OK = "ok"
TRITON, TORCH = "triton", "torch"
Verdicts = dict[str, str]  # of each kernel OK, or how it differs


@dataclass(frozen=True)
class Verification:
    """What is verified: kernels for the widths of a model and a dtype, on a device."""

    names: Sequence[str]
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    def facts(self) -> dict[str, Any]:
        """All that a verdict depends on."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "capability": list(torch.cuda.get_device_capability(self.device)),
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
            "triton": installed("triton"),
            "source": source_digest(),
            "dtype": str(self.dtype),
            "sizes": vars(self.sizes),
        }

    def run(self) -> Verdicts:
        """Verify all kernels, but those that passed before on this kind of device."""
        facts = self.facts()
        passed = read_passed(facts)
        verdicts = {name: OK if name in passed else self._verdict(name) for name in self.names}

        now_passed = [name for name, verdict in verdicts.items() if verdict == OK]
        if set(now_passed) > passed:
            write_passed(facts, now_passed)
        return verdicts

    def _verdict(self, name: str) -> str:
        try:
            found = verify_kernel(name, self.sizes, self.dtype, self.device)
        except Exception as error:  # compilers and drivers may raise anything
            _check_device(name, self.device, error)
            return _first_line(error)
        return next((str(one) for one in found if not one.ok), OK)


def _check_device(name: str, device: torch.device, error: Exception) -> None:
    """Raise ValueError if a kernel left the device unusable, as an illegal access does."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        raise ValueError(
            f"got an error from the kernel {name!r} ({_first_line(error)}), after which the "
            "device computes nothing; expected a kernel that runs; set kernels='torch' and report "
            "it with the output of opensora-sp doctor"
        ) from error


def _first_line(error: Exception) -> str:
    """Messages of compilers and of CUDA are pages."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def choose_kernels(
    kernels: Kernels, model: Any, *, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Set which kernels this process takes, the same on all ranks. Collective.

    Logs the choice, and a warning for each kernel that is replaced by its reference.

    Args:
        kernels: "auto" takes the Triton kernels that are verified, "triton" takes all of them and
            requires that they are, "torch" takes none.
        model: an STDiT model, whose widths are verified.
        dtype: of its tokens.

    Returns:
        "triton" or "torch" for each kernel.

    Raises:
        ValueError: on every rank, with "triton", if there is no CUDA device, or a kernel differs
            from its reference.
    """
    check_kernels(kernels, device.type)
    set_kernels(kernels)
    names = kernel_names()
    if kernels == TORCH or device.type != "cuda":
        used = TRITON if kernels == TRITON else TORCH
        reason = "as asked for" if kernels != "auto" else f"the device is {device.type}"
        return _log(dict.fromkeys(names, used), reason)
    if dtype == torch.float64:
        return _log(dict.fromkeys(names, TORCH), "they compute in float32")
    if installed("triton") == ABSENT:
        return _log(dict.fromkeys(names, TORCH), "Triton is not installed")

    start = time.perf_counter()
    sizes = Sizes.of(model.config)
    own = Verification(names, sizes, dtype, device).run()
    verdicts = agreed(own)
    refused = {name: verdict for name, verdict in verdicts.items() if verdict != OK}
    if refused and kernels == TRITON:
        listed = "; ".join(f"{name}: {verdict}" for name, verdict in refused.items())
        raise ValueError(
            f"got kernels='triton', and kernels that differ from their references ({listed}); "
            "expected equal values and gradients; set kernels='auto', which replaces these, and "
            "report it with the output of opensora-sp doctor --device cuda"
        )

    for name, verdict in verdicts.items():
        selection.set_verified(name, [dtype] if verdict == OK else [])
        if verdict != OK:
            logger.warning(
                "kernel %s is replaced by plain torch, since it differs from it (%s): results stay "
                "right, steps take longer; report it with the output of opensora-sp doctor "
                "--device cuda, or set kernels='torch'",
                name,
                verdict,
            )
    used_by_name = {name: TORCH if name in refused else TRITON for name in names}
    return _log(used_by_name, f"verified in {time.perf_counter() - start:.1f} s")


def check_kernels(kernels: str, device_type: str) -> None:
    """Raise ValueError where ``kernels="triton"`` is asked for without a device that runs them."""
    if kernels == TRITON and device_type != "cuda" and not selection.INTERPRETED:
        raise ValueError(
            f"got kernels 'triton' on a device of type {device_type!r}; expected a CUDA device, "
            "for which Triton compiles; set kernels='auto' or 'torch'"
        )


def agreed(own: Verdicts) -> Verdicts:
    """Of each kernel OK if it is so on all ranks, else the first other verdict. Collective."""
    if not dist.is_initialized():
        return own

    verdicts = dict.fromkeys(own, OK)
    for rank, of_rank in gathered(own, None).items():
        for name, verdict in of_rank.items():
            if verdict != OK and verdicts[name] == OK:
                verdicts[name] = f"on rank {rank}: {verdict}"
    return verdicts


def _log(used: dict[str, str], reason: str) -> dict[str, str]:
    by_triton = [name for name, by in used.items() if by == TRITON]
    what = f"{', '.join(by_triton)} by Triton" if by_triton else "plain torch"
    logger.info("kernels: %s (%s)", what, reason)
    return used


def warn_of_other_kernels(before: dict[str, str] | None, now: dict[str, str]) -> None:
    """Warn if a run resumes with other kernels than those of its checkpoint, which round otherwise.

    Args:
        before: what the checkpoint holds; None in those of earlier versions.
    """
    changed = []
    for name, used in now.items():
        if before is not None and before.get(name, used) != used:
            changed.append(f"{name} by {used} (before by {before[name]})")
    if changed:
        logger.warning(
            "the run resumes with other kernels than its checkpoint: %s; its losses may differ "
            "from those of the uninterrupted run in the last digits; resume on the same kind of "
            "device, or set kernels='torch' for all of a run",
            ", ".join(changed),
        )


def source_digest() -> str:
    """Sixteen hex digits of the SHA-256 of the kernels' source files."""
    hashed = hashlib.sha256()
    folder = Path(kernels_package.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        hashed.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]


def cache_folder() -> Path:
    """``opensora_sp`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opensora_sp"


def _cache_file(facts: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{key}.json"


def read_passed(facts: dict[str, Any]) -> set[str]:
    """The kernels that passed before with the same facts; of a damaged file none."""
    try:
        content = json.loads(_cache_file(facts).read_text())
        return set(content["passed"]) if content["facts"] == facts else set()
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def write_passed(facts: dict[str, Any], passed: Sequence[str]) -> None:
    """Remember which kernels have passed; failures are verified again by the next run."""
    path = _cache_file(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps({"facts": facts, "passed": list(passed)}, indent=1))
    except OSError as error:
        logger.info("verdicts on kernels are not kept: %s", error)
