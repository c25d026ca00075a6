"""The address of rank 0's host that the ranks of other hosts connect to."""

from __future__ import annotations

import pytest

from opensora_sp.runtime import host_checks


def test_the_address_is_the_one_that_other_hosts_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host's own name is a loopback address first, or the master a virtual one."""
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    asked = []

    def route(master: tuple[str, int]) -> tuple[str, str | None]:
        asked.append(master[0])
        return ("10.0.0.7" if master[0] == "172.30.0.1" else master[0]), None

    monkeypatch.setattr(host_checks, "_route_to", route)
    for resolved, address in (
        (["127.0.1.1", "10.0.0.5"], "10.0.0.5"),
        (["fd00::5", "10.0.0.5"], "10.0.0.5"),
        (["fd00::5"], "fd00::5"),
        (["172.30.0.1"], "10.0.0.7"),
        (["127.0.0.1"], "127.0.0.1"),
    ):
        monkeypatch.setattr(host_checks, "resolve", lambda master, found=resolved: found)
        assert host_checks.rendezvous_address() == address
