"""Look at one host: what is installed, what it has, and what would keep a run from starting there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from opensora_sp.runtime.host_checks import (
    check_devices,
    check_interfaces,
    check_own_address,
    interfaces,
    shared_memory,
)
from opensora_sp.runtime.versions import ABSENT, PACKAGE, versions

GB = 1e9
LITTLE_MEMORY, LITTLE_SHARED_MEMORY = 2 * GB, 1 * GB
PASSED_ON = re.compile(
    r"(NCCL|GLOO|CUDA|OMP|TORCH|OPENSORA_SP)_\w+|(PYTHON|LD_LIBRARY_)?PATH"
)  # no secrets: it is shown
READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}  # in bash
Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One line of a report: what was looked at, what was found, whether that is good, what to do if not."""

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""


@dataclass
class Report:
    """What there is to say about one host. ``facts`` must be the same on all hosts of a run."""

    host: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    gpus: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        checks = [Check(**one) for one in data["checks"]]
        return cls(data["host"], checks, data["facts"], data["gpus"])

    @property
    def ok(self) -> bool:
        return all(check.status != "FAIL" for check in self.checks)


def examine(*, port: int | None = None, master: str | None = None) -> Report:
    """Look at this host.

    Args:
        port: that rank 0 would listen at, if it ran here.
        master: the first host of several; None if the run stays on this host.
    """
    facts = versions()
    checks = [
        *_software(facts),
        *_devices(),
        _memory(),
        _shared_memory(),
        *([_port(port)] if port else []),
        _network(),
        *([_own_address(master)] if master else []),
        *_variables(several_hosts=master is not None),
    ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Report(socket.gethostname(), checks, facts, gpus)


def _sentence(name: str, good: str, check: Callable[[], None]) -> Check:
    """What a check of the launch says: an error of it in three parts becomes what was found, and advice."""
    try:
        check()
    except ValueError as error:
        found, _, rest = str(error).partition("; ")
        return Check(name, found.removeprefix("got "), "FAIL", rest)
    return Check(name, good)


def _software(facts: dict[str, str]) -> list[Check]:
    checks = [
        Check("opensora-sp", f"{facts['opensora-sp']} in {PACKAGE}"),
        Check("python", f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"),
        Check("torch", f"{facts['torch']}, built for CUDA {facts['CUDA of torch']}{_driver()}"),
    ]
    if facts["colossalai"] == ABSENT:
        checks.append(
            Check("ColossalAI", ABSENT, "FAIL", "pip install colossalai==0.5.0: training needs it")
        )
    else:
        checks.append(Check("ColossalAI", facts["colossalai"]))
    flash = facts["flash-attn"]
    checks.append(
        Check(
            "flash-attn",
            flash if flash != ABSENT else f"{ABSENT}, and not needed: torch SDPA is used",
        )
    )
    others = ("transformers", "diffusers", "einops", "safetensors", "av")
    checks.append(Check("packages", ", ".join(f"{name} {facts[name]}" for name in others)))
    found, own = shutil.which("torchrun"), Path(sys.executable).parent
    if found is None or Path(found).parent.resolve() != own.resolve():
        advice = f"activate the environment (PATH={own}:...): colossalai run takes the torchrun that it finds first"
        return [
            *checks,
            Check("torchrun", f"{found or 'none'} on the PATH, python in {own}", "warn", advice),
        ]
    return [*checks, Check("torchrun", found)]


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
    return f", NCCL {nccl}" + (f", driver {driver[0]}" if driver else "")


def _devices() -> list[Check]:
    if not torch.cuda.is_available():
        return [_sentence("devices", f"no GPU: {os.cpu_count()} CPU cores, gloo", check_devices)]
    checks = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found = f"{facts.name}, {free / GB:.1f} GB free of {total / GB:.1f}, compute {facts.major}.{facts.minor}"
        taken = free < 0.9 * total
        advice = "something else uses it: see nvidia-smi" if taken else ""
        checks.append(Check(f"GPU {number}", found, "warn" if taken else "ok", advice))
    return checks


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GB:.1f} GB free of {memory.total / GB:.1f}"
    if memory.available < LITTLE_MEMORY:
        return Check("memory", found, "warn", "end what takes it: loading a model alone takes more")
    return Check("memory", found)


def _shared_memory() -> Check:
    usage = shared_memory()
    if usage is None:
        return Check(
            "shared memory", "no /dev/shm", "warn", "num_workers must be 0; mount a tmpfs there"
        )
    found = f"{usage[1] / GB:.2f} GB free of {usage[0] / GB:.2f} in /dev/shm"
    if usage[1] < LITTLE_SHARED_MEMORY:
        return Check(
            "shared memory",
            found,
            "warn",
            "docker run --shm-size=8g, or num_workers=0; NCCL takes some too",
        )
    return Check("shared memory", found)


def _port(port: int) -> Check:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", port))
        except OSError as error:
            return Check(
                name,
                f"{error.strerror}{_user_of(port)}",
                "FAIL",
                "pass another --master_port, or end that",
            )
    return Check(name, "free")


def _user_of(port: int) -> str:
    """The process that listens at a port, where this user may know."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f", by process {one.pid} ({psutil.Process(one.pid).name()})"
    except psutil.Error:
        pass
    return ""


def _network() -> Check:
    known = {name: addresses for name, addresses in interfaces().items() if addresses}
    good = ", ".join(f"{name} {addresses[0]}" for name, addresses in known.items())
    return _sentence("network", good, check_interfaces)


def _own_address(master: str) -> Check:
    return _sentence(
        "own address", "other hosts can reach it", lambda: check_own_address((master, 22))
    )


def _variables(*, several_hosts: bool) -> list[Check]:
    shown = {name: value for name, value in sorted(os.environ.items()) if PASSED_ON.fullmatch(name)}
    shown = {name: value for name, value in shown.items() if "PATH" not in name}
    checks = [
        Check(
            "environment",
            ", ".join(f"{name}={value}" for name, value in shown.items()) or "nothing set",
        )
    ]
    broken = [
        name for name, value in os.environ.items() if not _survives_colossalai_run(name, value)
    ]
    if several_hosts and broken:
        advice = "unset them: colossalai run sends the whole environment through a shell, which would fail or run them"
        checks.append(
            Check(
                "colossalai run",
                f"environment variables {', '.join(sorted(broken))}",
                "warn",
                advice,
            )
        )
    return checks


def _survives_colossalai_run(name: str, value: str) -> bool:
    """Whether ``export NAME="VALUE"`` means the same to bash; several lines, and nothing, are not sent at all."""
    if not value or "\n" in value:
        return True
    return (
        re.fullmatch(r"[A-Za-z_]\w*", name) is not None
        and name not in READ_ONLY
        and not set(value) & set('"`$\\')
    )
