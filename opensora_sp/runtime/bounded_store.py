"""A store whose calls end, whatever happens to its server.

torch's ``TCPStore`` sends a request and then reads the answer without a limit: its ``timeout`` is
kept by the server. A server that is stopped (SIGSTOP), a frozen host or a network that drops
packets would hold the caller for ever, with the timeouts of all other ranks that it watches.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from opensora_sp.common import console

SLICE = 1.0  # seconds
CONNECT_MARGIN = 2.0  # seconds beyond the timeout of torch, which then reports the reason itself

Calls = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]
"""What a thread is to call and where it puts the result; None ends the thread."""


class BoundedStore:
    """The methods of a store, of which each raises RuntimeError after ``timeout`` seconds.

    After the first one that did so, all raise at once. A daemon thread makes the calls, one after
    the other, and may wait for ever: no process waits for it at its end.

    Attributes:
        store: the store itself, whose methods have no bound.
        timeout: may be changed from call to call.

    Waiting is counted in slices, so a process that resumes after being suspended still reads the
    answer that arrived meanwhile.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self.store, self.timeout = store, timeout
        self._is_lost = False
        self._calls: Calls = SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_serve, args=(self._calls,), name="store", daemon=True).start()

    @classmethod
    def connect(cls, make: Callable[[], Any], timeout: float) -> BoundedStore:
        """Make the store within about ``timeout``.

        torch's constructor limits the time to connect, but not that to wait for a first answer.
        """
        bounded = cls(None, timeout + CONNECT_MARGIN)
        bounded.store = bounded._call(make)
        bounded.timeout = timeout
        return bounded

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self.store, method))

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self._is_lost:
            raise RuntimeError("it did not answer before")

        answer: Future[Any] = Future()
        self._calls.put((partial(method, *args), answer))
        timeout = self.timeout
        for _ in range(max(1, round(timeout / SLICE))):
            with suppress(NotDone):
                return answer.result(SLICE)

        self._is_lost = True
        atexit.register(_exit_beside_a_call)
        raise RuntimeError(f"no answer for {timeout:g} s")


def _exit_beside_a_call() -> None:
    """End a process in which a thread may still wait for an answer.

    If that came while the interpreter is finalized, the thread would abort the process. The status
    is that of the script, or 1 where it has none: its store is lost.
    """
    logging.shutdown()  # flushes
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(console.exit_status or 1)


def _serve(calls: Calls) -> None:
    while (request := calls.get()) is not None:
        call, answer = request
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

        # They hold the store, whose server lives as long as it does.
        del request, call, answer
