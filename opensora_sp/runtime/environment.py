"""Environment variables set by ``torchrun``, ``colossalai run`` or ``srun``, read and checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ADVICE = "start with torchrun or colossalai run, which set them, or set all of " + ", ".join(
    REQUIRED
)


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that were started with it.

    Attributes:
        local_world_size: ranks on this host; all, where the launcher does not set it.
        master: address and port of the rendezvous.
        agent_store: True if torchrun itself hosts the store at ``master``, so that no rank has to.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int]
    agent_store: bool

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Launch | None:
        """Read the environment; None without a launcher, where the process is alone.

        Raises:
            ValueError: if variables are missing or contradict each other.
        """
        variables = os.environ if environment is None else environment
        if "WORLD_SIZE" not in variables and "RANK" not in variables:
            return None

        missing = [name for name in REQUIRED if name not in variables]
        if missing:
            given = ", ".join(f"{name}={variables[name]}" for name in REQUIRED if name in variables)
            raise ValueError(
                f"got {given} in the environment, but no {', '.join(missing)}; expected all; "
                f"{ADVICE}"
            )

        # srun and hand-written launches do not set it.
        variables = {"LOCAL_WORLD_SIZE": variables["WORLD_SIZE"], **variables}
        launch = cls(
            rank=_integer(variables, "RANK"),
            world_size=_integer(variables, "WORLD_SIZE"),
            local_rank=_integer(variables, "LOCAL_RANK"),
            local_world_size=_integer(variables, "LOCAL_WORLD_SIZE"),
            master=(variables["MASTER_ADDR"], _integer(variables, "MASTER_PORT")),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        launch._check()
        return launch

    @classmethod
    def of_process_group(cls) -> Launch:
        """The ranks of the default process group, which meet in its store."""
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
        master = (os.environ.get("MASTER_ADDR", "the process group"), 0)
        return cls(rank, world_size, rank, world_size, master, agent_store=True)

    def _check(self) -> None:
        local, world_size = self.local_world_size, self.world_size
        if not (0 <= self.rank < world_size and 0 <= self.local_rank < local <= world_size):
            raise ValueError(
                f"got RANK {self.rank}, WORLD_SIZE {world_size}, LOCAL_RANK {self.local_rank}, "
                f"LOCAL_WORLD_SIZE {local} in the environment; expected ranks from 0 to the number "
                f"of processes less one, over all hosts and on this one; {ADVICE}"
            )

    @property
    def spans_hosts(self) -> bool:
        """True if some ranks run on other hosts, as far as the launcher's variables show."""
        return self.local_world_size < self.world_size

    @property
    def hosts_store(self) -> bool:
        """True if it is this process that listens at ``master``."""
        return self.rank == 0 and not self.agent_store


def resolve(host: str) -> list[str]:
    """IP addresses of a host name.

    Raises:
        OSError: if the name is unknown.
    """
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(
            f"got {name}={variables[name]!r} in the environment; expected an integer; {ADVICE}"
        ) from None
