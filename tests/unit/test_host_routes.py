"""Hosts connect to each other before gloo does: on two loopback addresses of this host."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from opensora_sp.runtime import host_checks, host_routes, rendezvous
from opensora_sp.runtime.bounded_store import BoundedStore
from opensora_sp.runtime.environment import Launch

ADDRESSES = ["127.0.0.1", "127.0.0.2"]
NO_ROUTE = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def connect_two_hosts(
    monkeypatch: pytest.MonkeyPatch, failing_attempts: int
) -> tuple[list[Exception | None], list[str]]:
    """Two ranks on each of two hosts; returns the error of each rank, and where they connected."""
    addresses, failures = list(ADDRESSES), [NO_ROUTE] * failing_attempts
    connected = []
    connect = socket.create_connection

    def attempt(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == ADDRESSES[1] and failures:
            raise failures.pop()
        connected.append(address[0])
        return connect(address, timeout)

    monkeypatch.setattr(host_routes, "gloo_address", addresses.pop)
    monkeypatch.setattr(host_routes.socket, "create_connection", attempt)
    launches = iter([Launch(2 * h + k, 4, k, 2, ("", 1), False) for h in (0, 1) for k in (0, 1)])
    monkeypatch.setattr(host_routes.Launch, "read", lambda: next(launches))
    store = BoundedStore(dist.HashStore(), timeout=20.0)

    def rank(_: int) -> Exception | None:
        try:
            host_routes.connect_hosts(store)
        except ValueError as error:
            return error
        return None

    with ThreadPoolExecutor(4) as ranks:
        return list(ranks.map(rank, range(4))), sorted(connected)


def test_a_host_that_is_out_of_reach_at_first_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors, connected = connect_two_hosts(monkeypatch, failing_attempts=2)
    assert errors == [None] * 4 and connected == ADDRESSES


def test_a_host_that_stays_out_of_reach_is_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_routes, "TIMEOUT", 0.3)
    errors, _ = connect_two_hosts(monkeypatch, failing_attempts=1000)
    assert len(set(map(str, errors))) == 1
    name = socket.gethostname()
    assert str(errors[0]).startswith(
        f"got no connection from {name} to {name} at 127.0.0.2 within 0.3 s (No route to host); "
    )


def test_ranks_of_one_host_connect_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_routes.Launch, "read", lambda: Launch(0, 2, 0, 2, ("", 1), False))
    store = BoundedStore(dist.HashStore(), timeout=20.0)
    host_routes.connect_hosts(store)  # the other rank would be awaited for ever


def test_the_address_is_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lo": ["127.0.0.1"], "eth0": ["fe80::1", "10.0.0.5"]}
    monkeypatch.setattr(host_checks, "interfaces", lambda: known)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,lo")
    assert host_checks.gloo_address() == "10.0.0.5"

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert host_checks.gloo_address() == ""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(host_checks, "resolve", lambda name: [f"address of {name}"])
    assert host_checks.gloo_address() == f"address of {socket.gethostname()}"
    # The first one, as ``check_own_address`` judges: Debian's 127.0.1.1 is not taken for it.
    monkeypatch.setattr(host_checks, "resolve", lambda name: ["2001:db8::5", "127.0.1.1"])
    assert host_checks.gloo_address() == "2001:db8::5"


def test_a_store_that_is_lost_meanwhile_is_an_error_of_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 ends after all have joined, and takes the store along."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    launch = Launch(1, 2, 0, 1, ("127.0.0.1", server.port), False)
    monkeypatch.setattr(host_routes.Launch, "read", lambda: launch)
    store = BoundedStore(client, timeout=20.0)
    del server

    with pytest.raises(ValueError, match="got no response from the store at .*look at its output"):
        host_routes.connect_hosts(store)


def test_the_attempts_end_before_the_start_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.JOIN_TIMEOUT, "0.5")
    errors, _ = connect_two_hosts(monkeypatch, failing_attempts=1000)
    assert "within 0.4 s" in str(errors[0])
