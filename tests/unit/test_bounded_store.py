"""Calls of a store whose server does not answer end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from polling import wait_until

from opensora_sp.runtime import run_store
from opensora_sp.runtime.run_store import BoundedStore


class Server:
    """Answers ``get`` unless it is frozen."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()
        self.asked = 0

    def get(self, key: str) -> str:
        self.asked += 1
        self.runs.wait()
        if key == "absent":
            raise ValueError("got no such key")
        return f"value of {key}"


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones; and the process of the tests ends as it would without a lost store."""
    monkeypatch.setattr(run_store, "SLICE", 0.05)
    monkeypatch.setattr(run_store, "atexit", SimpleNamespace(register=lambda function: None))


def test_answers_and_errors_are_passed_on() -> None:
    store = BoundedStore(Server(), 1.0)
    assert store.get("one") == "value of one"
    with pytest.raises(ValueError, match="no such key"):
        store.get("absent")
    assert store.get("two") == "value of two"


def test_a_frozen_server_is_given_up_and_not_asked_again() -> None:
    server = Server()
    store = BoundedStore(server, 0.2)
    server.runs.clear()

    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="no answer for 0.2 s"):
        store.get("one")
    assert 0.15 < time.monotonic() - begun < 5

    server.runs.set()
    with pytest.raises(RuntimeError, match="did not answer before"):
        store.get("two")
    assert server.asked == 1


def test_a_late_answer_within_the_bound_counts() -> None:
    server = Server()
    store = BoundedStore(server, 30.0)
    server.runs.clear()
    threading.Timer(0.2, server.runs.set).start()
    assert store.get("one") == "value of one"


def test_its_thread_ends_with_it_and_keeps_no_store_alive() -> None:
    def threads() -> int:
        return sum(one.name == "store" for one in threading.enumerate())

    before = threads()
    store = BoundedStore(Server(), 1.0)
    store.get("one")
    assert threads() == before + 1
    del store
    wait_until(lambda: threads() == before)


# By statement at the end of a script, its exit status.
ENDS = {
    "pass": 1,
    "raise ValueError('got a; expected b; do c')": 2,
    "sys.exit(130)": 130,
    "sys.exit(143)": 143,
}
SCRIPT = """
import os, sys, time
from opensora_sp.common.console import report_errors
from opensora_sp.runtime import run_store
run_store.SLICE = 0.05
class Server:
    def get(self):
        time.sleep(0.3)
for end in sys.argv[1:]:
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
try:
    run_store.BoundedStore(Server(), 0.1).get()
except RuntimeError as error:
    print(error)
with report_errors():
    exec(end)
"""


def test_a_process_ends_although_an_answer_comes_while_it_does() -> None:
    """Such a thread would abort it. The script's exit status stays, and what was logged.

    Each end is that of a fork, so that one process imports.
    """
    command = [sys.executable, "-c", SCRIPT, *ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    wanted = [f"no answer for 0.1 s\n{status}\n" for status in ENDS.values()]
    assert done.stdout == "".join(wanted), done.stderr
