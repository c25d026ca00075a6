"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from exits import recorded_exits

from opensora_sp.runtime import processes as module
from opensora_sp.runtime.processes import SignalHandler


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """As in a terminal: a shell ignores it in what it starts in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_a_request_to_stop_until_the_handler_is_removed(name: str) -> None:
    number = signal.Signals[name]
    former = signal.getsignal(number)
    signals = SignalHandler()
    signals.install()
    try:
        os.kill(os.getpid(), number)
        assert signals.received == name
    finally:
        signals.uninstall()
    assert signal.getsignal(number) is former


def test_a_script_keeps_its_own_handler_of_sigusr1() -> None:
    got: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    signals = SignalHandler()
    try:
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        signals.uninstall()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert got == [signal.SIGUSR1] and signals.received == ""


def test_sigusr1_after_ctrl_c_leaves_the_run_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike SIGTERM, which torchrun sends after a second Ctrl-C."""
    monkeypatch.setattr(module, "SAME_INTERRUPT", 0.0)
    signals = SignalHandler()
    signals.install()
    try:
        with recorded_exits() as codes:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert codes == [] and signals.received == "SIGINT"
            os.kill(os.getpid(), signal.SIGTERM)
            assert codes == [130]
    finally:
        signals.uninstall()
