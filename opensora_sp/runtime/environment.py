"""What ``torchrun``, ``colossalai run`` or ``srun`` tell a process about its place, read and checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ADVICE = "start with torchrun or colossalai run, which set them, or set all of " + ", ".join(NEEDED)


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were started with it.

    ``local_world_size`` counts the ranks of this host; None where the launcher does not say. ``agent_store`` is whether
    torchrun itself keeps the store at ``master``, so that no rank has to.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master: tuple[str, int]
    agent_store: bool

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Launch | None:
        """What the environment says; None if nobody launched this process, which is then a world of its own.

        Raises:
            ValueError: if variables are missing or cannot all be true.
        """
        given = os.environ if environment is None else environment
        if "WORLD_SIZE" not in given and "RANK" not in given:
            return None
        missing = [name for name in NEEDED if name not in given]
        if missing:
            there = ", ".join(f"{name}={given[name]}" for name in NEEDED if name in given)
            raise ValueError(
                f"got {there} in the environment, but no {', '.join(missing)}; expected all; {ADVICE}"
            )
        rank, world_size, local_rank, port = (
            _number(given, n) for n in (*NEEDED[:3], "MASTER_PORT")
        )
        local = _number(given, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in given else None
        largest = world_size if local is None else local
        if not (0 <= rank < world_size and 0 <= local_rank < largest <= world_size):
            of_host = "" if local is None else f", LOCAL_WORLD_SIZE {local}"
            raise ValueError(
                f"got RANK {rank}, WORLD_SIZE {world_size}, LOCAL_RANK {local_rank}{of_host} in the environment; "
                f"expected ranks from 0 to the number of processes less one, over all hosts and on this one; {ADVICE}"
            )
        if not 0 < port < 65536:
            raise ValueError(
                f"got MASTER_PORT {port}; expected 1 to 65535; choose one that is free, such as 29500"
            )
        agent = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, local_rank, local, (given["MASTER_ADDR"], port), agent)

    @property
    def spans_hosts(self) -> bool:
        """Whether some of the ranks run on other hosts, as far as the launcher says."""
        return self.local_world_size is not None and self.local_world_size < self.world_size

    @property
    def keeps_store(self) -> bool:
        """Whether it is this process that listens at ``master``."""
        return self.rank == 0 and not self.agent_store

    def check_master(self) -> None:
        """Raise ValueError if the name of the first host leads nowhere, or only to this host while there are others."""
        host, port = self.master
        try:
            found = {
                str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            }
        except OSError as error:
            raise ValueError(
                f"got MASTER_ADDR {host!r}, which {socket.gethostname()} cannot resolve ({error.strerror or error}); "
                "expected a name or address of the first host that all hosts know; pass --master_addr ADDRESS"
            ) from None
        if self.spans_hosts and all(map(is_loopback, found)):
            raise ValueError(
                f"got MASTER_ADDR {host!r}, which means {socket.gethostname()} itself, with ranks on several hosts; "
                "expected an address of the first host that the others reach; pass --master_addr ADDRESS"
            )


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        raise ValueError(
            f"got {name}={given[name]!r} in the environment; expected an integer; {ADVICE}"
        ) from None
