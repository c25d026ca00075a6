"""The server of the watchdog's store: at one address, and closed once all ranks have connected."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from .host_checks import can_look_up_names

logger = logging.getLogger(__name__)
SO_ATTACH_FILTER = 26  # of Linux; Python's socket module does not name it
BPF_RETURN = 0x06  # the instruction that ends a filter with the number of bytes to accept
UNNAMED = (
    "the watchdog's store listens on all interfaces, instead of %s alone: the names of the ranks' "
    "hosts cannot be looked up; write their addresses into /etc/hosts, or repair the name server"
)


class StoreServer:
    """A ``TCPStore`` that this process hosts at one address of its host, at a port of its own.

    By itself a ``TCPStore`` listens on all interfaces. One that is given a socket cannot use libuv
    in torch 2.5, and without libuv a client that sends half a request blocks it for all others. So
    no further client may connect once the ranks have.

    Without libuv, torch 2.5 aborts the process where it cannot look up the names of its clients.
    There the store listens on all interfaces, with libuv; entries that are not signed are ignored.

    Args:
        address: an IP address of this host.
        clients: the addresses of the hosts of the ranks.
        timeout: seconds that the store waits for a name.

    Attributes:
        store: the store itself.
        port: where it listens.

    Raises:
        OSError: if this host cannot listen at the address.
    """

    def __init__(self, address: str, timeout: float, clients: Iterable[str] = ()) -> None:
        limit = timedelta(seconds=timeout)
        self._listener: socket.socket | None = None
        if not can_look_up_names({address, *clients}):
            logger.warning(UNNAMED, address)
            self.store = dist.TCPStore(address, 0, None, True, limit, wait_for_workers=False)
            self.port: int = self.store.port
            return

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self.port = self._listener.getsockname()[1]

        self.store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=self._listener.dup().detach(),
            use_libuv=False,
        )

    def refuse_connections(self) -> None:
        """Let the kernel drop packets that would open a connection; existing ones stay.

        A filter of one instruction, "accept 0 bytes", does so; see ``man 7 socket``. Where the
        system has none, entries that are not signed are still ignored.
        """
        if self._listener is None:
            return
        accept_nothing = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(accept_nothing))
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError as error:
            logger.debug("the port of the watchdog's store stays open (%s)", error)
        self._listener.close()
