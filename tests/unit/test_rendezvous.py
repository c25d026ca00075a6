"""The rendezvous on a store of this process: ranks of other versions, and reminders."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from opensora_sp.runtime import rendezvous, run_store
from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.rank_info import device_kind, versions


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the ranks of this process's first rendezvous see, in a store that lives here."""
    server = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_open_store", lambda launch, timeout: server)
    return dist.PrefixStore("opensora_sp/0/1", server)


@pytest.fixture(autouse=True)
def short_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank reads the verdict here."""
    monkeypatch.setattr(rendezvous, "EXIT_TIMEOUT", 0.5)


def rank_0_of(world_size: int) -> Launch:
    return Launch(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        master=("127.0.0.1", 29500),
        agent_store=False,
    )


def report(store: Any, rank: int, world_size: int, **what: Any) -> None:
    """As the first release wrote it: the names and fields are read by every later one."""
    info = dict(rank=rank, world_size=world_size, host="beta", versions={}, settings={}, error=None)
    number = store.add("arrived", 1)
    store.set(f"arrival {number}", json.dumps(info | what))


def test_a_rank_with_another_version_is_named_at_once(store: Any) -> None:
    place = rendezvous.Rendezvous(rank_0_of(2), timeout=60)
    report(store, 1, 2, versions={"opensora_sp": "0.0.1"})

    began = time.monotonic()
    with pytest.raises(ValueError, match=r"got different versions: .*opensora_sp .*0\.0\.1"):
        place.join({})
    assert time.monotonic() - began < 30
    assert b"got different versions" in store.get("verdict")


@pytest.mark.parametrize(("settings", "ours"), [({}, "set"), ({"LOCAL_WORLD_SIZE": "4"}, "4")])
def test_the_ranks_of_a_host_are_set_alike(
    store: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], ours: str
) -> None:
    """Otherwise ranks would build other groups, or take a group's link for another one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    software = {**versions(), "device": device_kind()}
    report(store, 1, 2, versions=software, settings={"LOCAL_WORLD_SIZE": "not set"})
    match = rf"got different settings: LOCAL_WORLD_SIZE {ours} on rank 0 .*, not set on rank 1 \(b"
    with pytest.raises(ValueError, match=match):
        rendezvous.Rendezvous(rank_0_of(2), timeout=60).join(settings)


def test_ranks_may_join_one_by_one_and_the_last_refuses(store: Any) -> None:
    others = range(1, 6)

    def join_slowly() -> None:
        for rank in others:
            time.sleep(0.3)
            report(store, rank, 6, error="no GPU" if rank == others[-1] else None)

    thread = threading.Thread(target=join_slowly)
    place = rendezvous.Rendezvous(rank_0_of(6), timeout=60)
    thread.start()
    with pytest.raises(ValueError, match="rank 5 .* no GPU"):
        place.join({})
    thread.join()


def test_a_rank_of_another_run_does_not_join(store: Any) -> None:
    """Its own rank 0 has found the port in use, and the store of the other run answers."""
    for rank in range(2):
        report(store, rank, 2)
    store.set("verdict", "")

    stranger = replace(rank_0_of(2), rank=1)
    with pytest.raises(ValueError, match=r"got rank 1 \(.*\) as number 3 of 2 ranks at 127.0.0.1"):
        rendezvous.Rendezvous(stranger, timeout=60).join({})


def test_the_time_out_holds_where_another_program_has_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that accepts connections in silence, as torch itself would wait for ever."""
    monkeypatch.setattr(run_store, "SLICE", 0.1)
    monkeypatch.setattr(run_store, "atexit", SimpleNamespace(register=lambda function: None))
    monkeypatch.setattr(run_store, "CONNECT_MARGIN", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        launch = replace(rank_0_of(2), rank=1, master=silent.getsockname())
        begun = time.monotonic()
        with pytest.raises(ValueError, match="no answer for") as error:
            rendezvous.Rendezvous(launch, timeout=0.5)
    assert time.monotonic() - begun < 20
    assert "no other program uses the port" in str(error.value)
