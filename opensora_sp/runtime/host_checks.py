"""Requirements of ranks on their host: network interfaces, the GPUs asked for, shared memory."""

from __future__ import annotations

import os
import shutil
import socket
from glob import glob

import psutil
import torch

from .environment import Launch, is_loopback, resolve

SHARED_MEMORY = "/dev/shm"
PREFETCHED = 2  # batches that a worker of torch's DataLoader makes ahead
MB = 1e6


def check_machine(launch: Launch) -> None:
    """Check the devices of this host's ranks, and choose the interface to the other hosts.

    Raises:
        ValueError: as ``check_devices`` does.
    """
    check_devices(launch)
    if launch.spans_hosts:
        choose_interface(launch.master)


def use_device(local_rank: int) -> tuple[torch.device, str]:
    """This rank's device, made the current one, and the backend of its process groups."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "nccl"


def check_devices(launch: Launch | None = None) -> None:
    """Check that torch can use the GPUs of this host.

    Raises:
        ValueError: if GPUs were asked for or are installed, but torch cannot use them, or has no
            kernels for them, or if there are fewer GPUs than ranks.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    host = socket.gethostname()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if launch is not None and launch.local_rank >= count:
            raise ValueError(
                f"got {launch.local_rank + 1} or more ranks on {host}, where torch sees {count} "
                f"GPUs (CUDA_VISIBLE_DEVICES={visible}); expected at most one rank for each; lower "
                "--nproc_per_node"
            )
        return

    if visible in ("", "-1", "NoDevFiles"):
        return
    nodes = sorted(glob("/dev/nvidia[0-9]*"))
    if visible is None and not nodes:
        return

    asked = f"the device {nodes[0]}" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise ValueError(
        f"got {asked} on {host}, but no GPU that torch can use (torch {torch.__version__} was "
        f"built {built}); expected a driver that is new enough (see nvidia-smi), a torch built for "
        "CUDA and, in a container, --gpus all; or set CUDA_VISIBLE_DEVICES= (empty) to compute on "
        "the CPU"
    )


def interfaces() -> dict[str, list[str]]:
    """Names of this host's network interfaces, and the IP addresses of each."""
    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [ip.address.split("%")[0] for ip in addresses if ip.family in internet]
        for name, addresses in psutil.net_if_addrs().items()
    }


def choose_interface(master: tuple[str, int]) -> None:
    """Let gloo listen at the interface by which this host reaches the first one.

    Without GLOO_SOCKET_IFNAME gloo listens at the address of the host's own name, which many
    distributions resolve to 127.0.1.1. Other hosts then connect to themselves.
    """
    _, interface = _route_to(master)
    if interface:
        # A user who has set it knows the network better.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _route_to(master: tuple[str, int]) -> tuple[str, str | None]:
    """Address and interface by which this host would reach another one; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Of a datagram socket: the kernel looks up its route and sends nothing.
            probe.connect(address)
            local = str(probe.getsockname()[0])
    except OSError:
        return "", None

    names = [name for name, addresses in interfaces().items() if local in addresses]
    return local, names[0] if names and not is_loopback(local) else None


def rendezvous_address() -> str:
    """The IP address of this host, on which rank 0 runs, that ``MASTER_ADDR`` stands for.

    Raises:
        OSError: if ``MASTER_ADDR`` is a name that is unknown.
    """
    master = os.environ.get("MASTER_ADDR", socket.gethostname())

    # Many distributions resolve a host's own name to 127.0.1.1 as well, which others do not reach.
    address = min(resolve(master), key=lambda ip: (is_loopback(ip), ":" in ip))

    # Where it is a virtual address, such as a service's, this host has another one.
    return _route_to((address, 1))[0] or address


def shared_memory() -> tuple[int, int] | None:
    """Total and free bytes of shared memory; None where the system has no ``/dev/shm``."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.total, usage.free


def check_shared_memory(batch_bytes: int, num_workers: int, local_ranks: int) -> None:
    """Raise ValueError if the batches of loader workers do not fit into shared memory.

    Args:
        batch_bytes: of the largest batch that a worker makes.
        num_workers: workers of each rank.
        local_ranks: ranks on this host, which share the memory.
    """
    usage = shared_memory()
    if num_workers == 0 or usage is None:
        return

    total, free = usage
    needed = batch_bytes * PREFETCHED * num_workers * local_ranks
    if needed > free:
        raise ValueError(
            f"got {free / MB:,.1f} MB free of {total / MB:,.1f} MB in {SHARED_MEMORY} on "
            f"{socket.gethostname()}; expected at least {needed / MB:,.1f} MB for {local_ranks} "
            f"ranks x {num_workers} workers x {PREFETCHED} batches of {batch_bytes / MB:,.1f} MB; "
            "lower num_workers (0 needs none), or start the container with more (docker run "
            f"--shm-size={max(1, -(-2 * needed // 10**9))}g, or --ipc=host)"
        )
