"""The watchdog's store: its port, and entries that no rank of the run has written."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from opensora_sp.runtime import host_checks
from opensora_sp.runtime.heartbeats import Heartbeat, HeartbeatStore
from opensora_sp.runtime.signed_store import SignedStore
from opensora_sp.runtime.store_server import StoreServer

TOKEN, OTHER_TOKEN = b"token of the run", b"token of another"
IGNORED = "got an entry in the watchdog's store that no rank of this run has signed"


@pytest.fixture
def shared() -> dist.HashStore:
    """A store that strangers write into, too."""
    return dist.HashStore()


def keys(store: SignedStore, *names: str) -> list[str]:
    """What a stranger sees who lists all entries."""
    return [store._key(name) for name in names]


def test_ranks_with_the_token_read_what_the_others_wrote(shared: dist.HashStore) -> None:
    one, other = SignedStore(shared, TOKEN), SignedStore(shared, TOKEN)
    one.set("stop", "")
    one.set("failure", "rank 1 failed: got \udce9, a byte of a path")
    assert other.get(["failure", "stop"]) == ["rank 1 failed: got ?, a byte of a path", ""]
    assert other.contains(["failure", "stop"]) and not other.contains(["failure", "absent"])


def test_the_first_failure_stays(shared: dist.HashStore) -> None:
    one, other = SignedStore(shared, TOKEN), SignedStore(shared, TOKEN)
    one.set("failure", "")
    assert one.replace("failure", "", "rank 0 failed") == "rank 0 failed"
    assert other.replace("failure", "", "rank 1 failed") == "rank 0 failed"


def test_names_are_not_known_to_strangers(shared: dist.HashStore) -> None:
    store = SignedStore(shared, TOKEN)
    store.set("failure", "")
    for stranger in (shared, SignedStore(shared, OTHER_TOKEN)):
        stranger.set("failure", "rank 0 failed: a stranger's text")
    assert store.get(["failure"]) == [""]


@pytest.mark.parametrize("entry", ["", "rank 0 failed", "0" * 64 + "rank 0 failed"])
def test_an_entry_without_the_signature_is_ignored_and_reported_once(
    shared: dist.HashStore, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SignedStore(shared, TOKEN)
    store.set("failure", "")
    shared.set(*keys(store, "failure"), entry)
    assert store.get(["failure"]) == store.get(["failure"]) == [None]
    (record,) = caplog.records
    assert record.getMessage().startswith(IGNORED) and "rank 0" not in record.getMessage()

    # It does not keep a rank from reporting its own failure.
    assert store.replace("failure", "", "rank 1 failed") == "rank 1 failed"
    assert store.get(["failure"]) == ["rank 1 failed"]


def test_entries_of_other_names_and_other_runs_do_not_count(shared: dist.HashStore) -> None:
    store, former = SignedStore(shared, TOKEN), SignedStore(dist.HashStore(), OTHER_TOKEN)
    for one in (store, former):
        one.set("failure", "rank 1 failed")
        one.set("stop", "")

    failure, stop = keys(store, "failure", "stop")
    shared.set(stop, shared.get(failure))
    assert store.get(["stop"]) == [None]
    shared.set(stop, former._store.get(*keys(former, "stop")))
    assert store.get(["stop"]) == [None]


def test_an_older_heartbeat_put_back_by_a_stranger_does_not_count(shared: dist.HashStore) -> None:
    store = HeartbeatStore(0, 1)
    store._store = SignedStore(shared, TOKEN)
    written = [Heartbeat(number, {}, {}, "a line", False) for number in range(3)]
    entries = []
    for heartbeat in written:
        store.write(heartbeat)
        entries.append(shared.get(*keys(store._store, "heartbeat 0")))

    assert store.heartbeats([0]) == {0: written[2]}
    for entry in (entries[0], b"no heartbeat"):
        shared.set(*keys(store._store, "heartbeat 0"), entry)
        assert store.heartbeats([0]) == {0: written[2]}


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 5.0)
    yield server
    server._listener.close()


def connected(server: StoreServer) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", server.port, timeout=timedelta(seconds=1), wait_for_workers=False
    )


def test_the_store_listens_at_one_address(server: StoreServer) -> None:
    assert server._listener.getsockname() == ("127.0.0.1", server.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


def test_ranks_connect_where_no_name_server_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's store without libuv would abort this process when the first one does."""

    def out_of_reach(*args: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getnameinfo", out_of_reach)
    server = StoreServer("127.0.0.1", 5.0, ["10.77.0.2"])
    rank = connected(server)
    server.refuse_connections()
    rank.set("name", "text")
    assert server.store.get("name") == b"text"
    assert "listens on all interfaces, instead of 127.0.0.1 alone" in caplog.text


def test_no_one_connects_after_the_ranks_have(server: StoreServer) -> None:
    rank = connected(server)
    server.refuse_connections()
    with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", server.port), 0.2):
        pass

    rank.set("name", "text")
    assert server.store.get("name") == b"text"


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
