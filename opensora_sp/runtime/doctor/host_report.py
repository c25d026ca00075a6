"""The checks of one host: software, devices, memory, network and environment variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from opensora_sp.common.importing import check_colossalai
from opensora_sp.runtime.host_checks import (
    check_architectures,
    check_devices,
    check_interfaces,
    check_own_address,
    interfaces,
    shared_memory,
)
from opensora_sp.runtime.versions import ABSENT, PACKAGE, PACKAGES, versions

GB = 1e9
MIN_MEMORY, MIN_SHARED_MEMORY = 2 * GB, 1 * GB

# Variables that decide how ranks start. No secrets: they are printed.
FORWARDED = re.compile(r"(NCCL|GLOO|CUDA|OMP|TORCH|OPENSORA_SP)_\w+|(PYTHON|LD_LIBRARY_)?PATH")
READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}  # in bash
Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One line of a report: what was checked, what was found, the verdict, and what to do."""

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""

    @classmethod
    def failed(cls, name: str, message: str) -> Check:
        """A failed check, of a message "got ...; expected ...; what to do"."""
        found, _, advice = message.partition("; ")
        return cls(name, found.removeprefix("got "), "FAIL", advice)


@dataclass
class Report:
    """All checks of one host. ``facts`` must be equal on all hosts of a run."""

    host: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    gpus: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    @property
    def ok(self) -> bool:
        return all(check.status != "FAIL" for check in self.checks)


def examine(*, port: int | None = None, master: str | None = None) -> Report:
    """Run all checks of this host.

    Args:
        port: at which rank 0 would listen, if it ran here.
        master: the first host of several; None if the run stays on this host.
    """
    facts = versions()
    checks = [*_software(facts), *_devices(), _memory(), _shared_memory()]
    if port:
        checks.append(_port(port))

    names = [f"{name} {addresses[0]}" for name, addresses in interfaces().items() if addresses]
    checks.append(_run_check("network", ", ".join(names), check_interfaces))
    if master:
        check = partial(check_own_address, (master, 22))
        checks.append(_run_check("own address", "other hosts can reach it", check))

    checks += _variables(several_hosts=master is not None)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Report(socket.gethostname(), checks, facts, gpus)


def _run_check(name: str, found: str, check: Callable[[], None]) -> Check:
    """The result of a check that a run makes as well: ``found``, or the error."""
    try:
        check()
    except ValueError as error:
        return Check.failed(name, str(error))
    return Check(name, found)


def _warn_if(problem: bool, name: str, found: str, advice: str) -> Check:
    return Check(name, found, "warn", advice) if problem else Check(name, found)


def _software(facts: dict[str, str]) -> list[Check]:
    colossalai, flash = facts["colossalai"], facts["flash-attn"]
    without_flash = f"{ABSENT}, and not needed: torch SDPA is used"
    if facts["flash-attn-3"] == ABSENT and _has_hopper():
        # Models are imported for this sentence alone.
        from opensora_sp.models.attention_table import INSTALL_FLASH3

        without_flash += f"; faster on this GPU: {INSTALL_FLASH3}"
    others = set(PACKAGES) - {"colossalai", "flash-attn"}
    packages = ", ".join(f"{name} {facts[name]}" for name in sorted(others))
    python = f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    torch_version = f"{facts['torch']}, built for CUDA {facts['CUDA of torch']}{_driver()}"

    return [
        Check("opensora-sp", f"{facts['opensora-sp']} in {PACKAGE}"),
        Check("python", python),
        Check("torch", torch_version),
        _run_check("ColossalAI", colossalai, check_colossalai),
        Check("flash-attn", without_flash if flash == ABSENT else flash),
        Check("packages", packages),
        _torchrun(),
    ]


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _torchrun() -> Check:
    found, own = shutil.which("torchrun"), Path(sys.executable).parent
    if found is not None and Path(found).parent.resolve() == own.resolve():
        return Check("torchrun", found)

    advice = (
        f"activate the environment (PATH={own}:...): colossalai run starts the first torchrun on "
        "the PATH"
    )
    return Check("torchrun", f"{found or 'none'} on the PATH, python in {own}", "warn", advice)


def _driver() -> str:
    if not torch.cuda.is_available():
        return ""

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text()) if version.exists() else None
    return f", NCCL {nccl}" + (f", driver {driver[0]}" if driver else "")


def _devices() -> list[Check]:
    if not torch.cuda.is_available():
        return [_run_check("devices", f"no GPU: {os.cpu_count()} CPU cores, gloo", check_devices)]
    return [_gpu(number) for number in range(torch.cuda.device_count())]


def _gpu(number: int) -> Check:
    facts = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    found = (
        f"{facts.name}, {free / GB:.1f} GB free of {total / GB:.1f}, compute "
        f"{facts.major}.{facts.minor}"
    )
    try:
        check_architectures(number)
    except ValueError as error:
        return Check.failed(f"GPU {number}", str(error))
    advice = "another process uses it: see nvidia-smi"
    return _warn_if(free < 0.9 * total, f"GPU {number}", found, advice)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GB:.1f} GB free of {memory.total / GB:.1f}"
    advice = "end processes that use memory: loading a model alone needs more"
    return _warn_if(memory.available < MIN_MEMORY, "memory", found, advice)


def _shared_memory() -> Check:
    name = "shared memory"
    usage = shared_memory()
    if usage is None:
        return Check(name, "no /dev/shm", "warn", "num_workers must be 0; mount a tmpfs there")

    total, free = usage
    found = f"{free / GB:.2f} GB free of {total / GB:.2f} in /dev/shm"
    advice = "docker run --shm-size=8g, or num_workers=0; NCCL needs some as well"
    return _warn_if(free < MIN_SHARED_MEMORY, name, found, advice)


def _port(port: int) -> Check:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", port))
        except OSError as error:
            found = f"{error.strerror}{_listener(port)}"
            advice = "pass another --master_port, on one host --standalone, or end that process"
            return Check(name, found, "FAIL", advice)
    return Check(name, "free")


def _listener(port: int) -> str:
    """The process that listens at a port, if this user may see it."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f", by process {one.pid} ({psutil.Process(one.pid).name()})"
    except psutil.Error:
        pass
    return ""


def _variables(*, several_hosts: bool) -> list[Check]:
    forwarded = [name for name in sorted(os.environ) if FORWARDED.fullmatch(name)]
    shown = [f"{name}={os.environ[name]}" for name in forwarded if "PATH" not in name]
    checks = [Check("environment", ", ".join(shown) or "nothing set")]

    broken = [
        name for name, value in os.environ.items() if not _survives_colossalai_run(name, value)
    ]
    if several_hosts and broken:
        found = f"environment variables {', '.join(sorted(broken))}"
        advice = (
            "unset them: colossalai run sends the whole environment through a shell, which would "
            "fail or run them"
        )
        checks.append(Check("colossalai run", found, "warn", advice))
    return checks


def _survives_colossalai_run(name: str, value: str) -> bool:
    """Whether ``export NAME="VALUE"`` in bash preserves the value.

    Empty values and those of several lines are not sent at all.
    """
    if not value or "\n" in value:
        return True
    is_name = re.fullmatch(r"[A-Za-z_]\w*", name) is not None
    return is_name and name not in READ_ONLY and not set(value) & set('"`$\\')
