"""All hosts of a run connect to each other, before gloo does.

gloo connects two ranks by a single attempt (torch 2.5). Where a network has just come back, this
attempt may fail: packets that were sent before, such as the last ones of a run that was cut off,
let the system look for the other host by ARP. If that search ends without an answer, connections
that were opened meanwhile end too, with "no route to host", and gloo reports "no error". So each
host tries until it succeeds, and a host that stays out of reach is named.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

from opensora_sp.json_reader import parse_json
from opensora_sp.polling import wait_until

from .bounded_store import BoundedStore
from .environment import Launch
from .host_checks import gloo_address
from .rendezvous import EXIT_TIMEOUT, join_timeout, reporting_lost_store

TIMEOUT = 60.0  # seconds to connect to all hosts; a bridge may forward nothing for the first 50
SHARE_OF_JOIN_TIMEOUT = 0.8  # at most, so that the reason is reported before ``StartLimit`` ends
ATTEMPT_TIMEOUT = 5.0  # seconds for one attempt
INTERVAL = 0.1  # seconds between two attempts

# Names in the store: counters of hosts, ranks that are ready, hosts that are done; where a host
# listens; why one is out of reach, and how many ranks know.
HOSTS, READY, DONE, LISTENS = "hosts", "ready", "connected", "host {} listens"
ERROR, KNOW = "no route", "know of no route"


def connect_hosts(store: BoundedStore | None) -> None:
    """Connect the first rank of each host to those of all others, once. Collective.

    Called within a ``StartLimit``, which ends a process whose peers do not arrive. Does nothing for
    ranks of one host.

    Args:
        store: of ``join_rendezvous``.

    Raises:
        ValueError: the same on every rank, if hosts do not reach each other in time; or if the
            store is lost.
    """
    launch = None if store is None else Launch.read()
    if store is None or launch is None or not launch.spans_hosts:
        return

    store.timeout = join_timeout()
    with reporting_lost_store(launch):
        error = _error_of_hosts(store, launch)
    if error:
        raise ValueError(error)


def _error_of_hosts(store: BoundedStore, launch: Launch) -> str:
    """Why a host is out of reach of another one, empty if none is; the same on every rank."""
    with ExitStack() as sockets:
        number = 0
        if launch.local_rank == 0:
            number = store.add(HOSTS, 1)
            store.set(LISTENS.format(number), _listen(sockets))
        store.add(READY, 1)
        _wait(lambda: store.add(READY, 0) >= launch.world_size)

        # All have counted their hosts.
        num_hosts = store.add(HOSTS, 0)
        if launch.local_rank == 0:
            others = [one for one in range(1, num_hosts + 1) if one != number]
            error = _connect(store, others)
            if error:
                store.set(ERROR, error)
            store.add(DONE, 1)
        _wait(lambda: store.add(DONE, 0) >= num_hosts)

    if not store.check([ERROR]):
        return ""
    reason: str = store.get(ERROR).decode()
    # A rank that exits may end the store, or let torchrun end the other ranks of its host.
    store.add(KNOW, 1)
    if launch.agent_store or launch.hosts_store:
        wait_until(lambda: store.add(KNOW, 0) >= launch.world_size, EXIT_TIMEOUT)
    return reason


def _listen(sockets: ExitStack) -> str:
    """Listen where gloo will; returns host, address and port as JSON, the port 0 if it cannot."""
    host, address = socket.gethostname(), gloo_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # The kernel completes connections that nobody accepts.
        listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    except OSError:  # gloo will report it
        return json.dumps([host, address, 0])
    sockets.enter_context(listener)
    return json.dumps([host, *listener.getsockname()[:2]])


def _connect(store: BoundedStore, others: list[int]) -> str:
    """Connect to other hosts; returns why one is out of reach, empty if none is."""
    timeout = min(TIMEOUT, SHARE_OF_JOIN_TIMEOUT * join_timeout())
    deadline = time.monotonic() + timeout
    for number in others:
        host, address, port = parse_json(store.get(LISTENS.format(number)), "where a host listens")
        reason = _attempt(address, port, deadline) if port else ""

        while reason and time.monotonic() < deadline:
            time.sleep(INTERVAL)
            reason = _attempt(address, port, deadline)
        if reason:
            return (
                f"got no connection from {socket.gethostname()} to {host} at {address} within "
                f"{timeout:g} s ({reason}); expected the hosts to reach each other at all ports; "
                "check the network and its firewalls, and whether GLOO_SOCKET_IFNAME has to name "
                "another interface"
            )
    return ""


def _attempt(address: str, port: int, deadline: float) -> str:
    """Why a connection fails, empty if it does not."""
    remaining = max(INTERVAL, deadline - time.monotonic())
    try:
        socket.create_connection((address, port), min(ATTEMPT_TIMEOUT, remaining)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _wait(condition: Callable[[], bool]) -> None:
    while not wait_until(condition, ATTEMPT_TIMEOUT):
        pass
