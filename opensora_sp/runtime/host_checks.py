"""What this machine must have for its ranks: network interfaces that exist, the GPUs asked for, shared memory."""

from __future__ import annotations

import os
import shutil
import socket
from glob import glob

import psutil
import torch

from .environment import Launch, is_loopback

SHARED_MEMORY = "/dev/shm"
PREFETCHED = 2  # batches that a worker of torch's DataLoader makes ahead
MB = 1e6


def check_machine(launch: Launch) -> None:
    """Raise ValueError if the ranks of this machine cannot start: devices, interfaces, addresses."""
    check_devices(launch)
    check_interfaces()
    launch.check_master()
    if launch.spans_hosts:
        check_own_address(launch.master)


def check_devices(launch: Launch | None = None) -> None:
    """Raise ValueError if GPUs were asked for, or are there, and torch cannot use them, or not all ranks get one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if launch is not None and launch.local_rank >= count:
            raise ValueError(
                f"got {launch.local_rank + 1} or more ranks on {socket.gethostname()}, where torch sees {count} GPUs "
                f"(CUDA_VISIBLE_DEVICES={visible}); expected at most one rank for each; lower --nproc_per_node"
            )
        return
    if visible in ("", "-1", "NoDevFiles"):
        return
    nodes = sorted(glob("/dev/nvidia[0-9]*"))
    asked = (
        f"CUDA_VISIBLE_DEVICES={visible}"
        if visible is not None
        else f"the device {nodes[0]}"
        if nodes
        else None
    )
    if asked is not None:
        built = (
            f"was built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "was built without CUDA"
        )
        raise ValueError(
            f"got {asked} on {socket.gethostname()}, but no GPU that torch can use (torch {torch.__version__} "
            f"{built}); expected a driver that is new enough (see nvidia-smi), a torch built for CUDA and, in a "
            "container, --gpus all; or set CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU"
        )


def interfaces() -> dict[str, list[str]]:
    """Names of this machine's network interfaces and their IP addresses."""
    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in addresses if one.family in internet]
        for name, addresses in psutil.net_if_addrs().items()
    }


def check_interfaces() -> None:
    """Raise ValueError if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface that has an address."""
    there = interfaces()
    with_address = {name for name, addresses in there.items() if addresses}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if not value:
            continue
        names = [name.strip() for name in value.split(",")]
        if variable.startswith("GLOO"):
            lacking = [name for name in names if name not in with_address]
        else:
            lacking = [] if _nccl_choice(value, with_address) else [value]
        if lacking:
            shown = ", ".join(
                f"{name} ({', '.join(addresses[:2]) or 'no address'})"
                for name, addresses in there.items()
            )
            raise ValueError(
                f"got {variable}={value} on {socket.gethostname()}, where no interface {lacking[0]!r} has an address; "
                f"expected one of {shown}; set {variable} to the one that reaches the other hosts, or unset it"
            )


def _nccl_choice(value: str, names: set[str]) -> set[str]:
    """The interfaces that NCCL takes: names that begin so, ``=`` for exactly these, ``^`` for all but these."""
    sign = value[0] if value[0] in "=^" else ""
    exact = sign == "=" or value.startswith("^=")
    given = [name for name in value.lstrip("=^").split(",") if name]
    matching = {
        name
        for name in names
        if any(name == one or (not exact and name.startswith(one)) for one in given)
    }
    return names - matching if sign == "^" else matching


def check_own_address(master: tuple[str, int]) -> None:
    """Raise ValueError if gloo would tell the other hosts to find this one at a loopback address.

    Without GLOO_SOCKET_IFNAME gloo listens where the name of the host points to, which many distributions let be
    127.0.1.1, and at 127.0.0.1 where the name is unknown; other hosts then connect to themselves.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    try:
        found = [
            str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        found = []
    if found and not is_loopback(found[0]):
        return
    address, interface = _way_to(master)
    advice = (
        f"set GLOO_SOCKET_IFNAME={interface}"
        if interface
        else "set GLOO_SOCKET_IFNAME to its network interface"
    )
    meaning = f"means {found[0]}" if found else "cannot be resolved"
    raise ValueError(
        f"got the host name {name!r}, which {meaning} on this host, with "
        "ranks on several hosts; expected an address that the other hosts reach, since gloo tells it to them; "
        f"{advice}{f' (address {address})' if interface else ''}, or correct /etc/hosts"
    )


def _way_to(master: tuple[str, int]) -> tuple[str, str | None]:
    """Address and interface by which this machine would reach another one; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return "", None
    return own, next(
        (name for name, known in interfaces().items() if own in known and not is_loopback(own)),
        None,
    )


def shared_memory() -> tuple[int, int] | None:
    """Bytes of shared memory in all, and free; None where the system has none to look at."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.total, usage.free


def check_shared_memory(batch_bytes: int, num_workers: int, local_ranks: int) -> None:
    """Raise ValueError if the batches that data workers hand over would not fit into shared memory.

    Args:
        batch_bytes: of the largest batch that a worker makes.
        num_workers: workers of each rank.
        local_ranks: ranks on this machine, which share the memory.
    """
    usage = shared_memory()
    if num_workers == 0 or usage is None:
        return
    needed = batch_bytes * PREFETCHED * num_workers * local_ranks
    if needed > usage[1]:
        total, free = (f"{number / MB:,.1f} MB" for number in usage)
        raise ValueError(
            f"got {free} free of {total} in {SHARED_MEMORY} on {socket.gethostname()}; expected at least "
            f"{needed / MB:,.1f} MB for {local_ranks} ranks x {num_workers} workers x {PREFETCHED} batches of "
            f"{batch_bytes / MB:,.1f} MB; lower num_workers (0 needs none), or start the container with more "
            f"(docker run --shm-size={max(1, -(-2 * needed // 10**9))}g, or --ipc=host)"
        )
