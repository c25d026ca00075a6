"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal

import pytest

from opensora_sp.runtime.signals import SignalHandler


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
