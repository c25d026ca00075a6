"""Verdicts on what runs on a device: found by checks, kept in a file, agreed by all ranks."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.common.files import atomic_write, read_json
from opensora_sp.compile_cache import cache_folder
from opensora_sp.models.kernels.selection import INTERPRETED
from opensora_sp.parallel.agreement import gathered
from opensora_sp.runtime.versions import installed

logger = logging.getLogger(__name__)

OK = "ok"
DEVICE = "the device"  # its verdict: whether it still computes after the checks
Verdicts = dict[str, str]  # by name OK, or why it may not run
Facts = dict[str, Any]


class BrokenDeviceError(ValueError):
    """A check left the device unusable, as an illegal access does."""


def device_facts(device: torch.device) -> Facts:
    """What compiled code depends on, in addition to its source."""
    return {
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
        ValueError: on every rank, if a check leaves the device of one unusable.
    """
    local_verdicts = _local_verdicts(checks, facts, device)
    try:
        verdicts = agreed(local_verdicts)
    except RuntimeError as error:
        # NCCL gathers on the device itself.
        if local_verdicts[DEVICE] != OK:
            raise ValueError(local_verdicts[DEVICE]) from error
        raise

    if (broken := verdicts.pop(DEVICE)) != OK:
        raise ValueError(broken)
    return verdicts


def _local_verdicts(
    checks: Mapping[str, Callable[[], str]], facts: Facts, device: torch.device
) -> Verdicts:
    passed = read_passed(facts)
    try:
        verdicts = {
            name: OK if name in passed else _verdict(name, check, device)
            for name, check in checks.items()
        }
    except BrokenDeviceError as error:
        # Other ranks wait for the verdicts of this one.
        return dict.fromkeys(checks, "not known") | {DEVICE: str(error)}

    now_passed = [name for name, verdict in verdicts.items() if verdict == OK]
    # Interpreted kernels say nothing about compiled ones.
    if set(now_passed) > passed and not INTERPRETED:
        write_passed(facts, now_passed)
    return verdicts | {DEVICE: OK}


def _verdict(name: str, check: Callable[[], str], device: torch.device) -> str:
    try:
        return check()
    except Exception as error:  # compilers and drivers may raise anything
        _check_device(name, device, error)
        return f"it could not be compared: {_first_line(error)}"


def _check_device(name: str, device: torch.device, error: Exception) -> None:
    """Raise BrokenDeviceError if the device computes nothing any more."""
    try:
        torch.zeros(1, device=device).item()
    except torch.cuda.OutOfMemoryError:
        pass  # a RuntimeError as well, of a device that is full
    except RuntimeError:
        raise BrokenDeviceError(
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
    return {
        name: _first_other({rank: rank_verdicts[rank][name] for rank in rank_verdicts})
        for name in verdicts
    }


def _first_other(verdicts: Mapping[int, str]) -> str:
    """The verdict that all ranks have, or the first that is not OK, with its rank."""
    if len(set(verdicts.values())) == 1:
        return verdicts[0]
    rank = next(rank for rank, verdict in verdicts.items() if verdict != OK)
    return f"on rank {rank}: {verdicts[rank]}"


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
        content = read_json(_file_of(facts))
        return set(content["passed"]) if content["facts"] == facts else set()
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def write_passed(facts: Facts, passed: Collection[str]) -> None:
    """Remember what has passed. What has not is checked again by the next run."""
    content = {"facts": facts, "passed": sorted(passed)}
    try:
        path = _file_of(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(content, indent=1))
    except OSError as error:
        logger.info("what was verified is not remembered: %s", error)
