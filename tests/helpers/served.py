"""A process that is started once in a run of tests, and forks for each call.

A call then has a fresh process without the seconds that imports take. All workers of pytest-xdist
share the server: the first that calls starts it, and it ends with the run.

    SERVER = Server("interpreter", environment)     # in the helper; `python -m interpreter`
    answer = SERVER.call(folder, function, args)    # in a test
    serve(respond)                                  # in the process
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polling import wait_until

# The main process of the run of tests, for its workers as well; `conftest.py` sets it.
RUN = "TEST_RUN_PID"
RESPOND = Callable[[dict[str, Any], Path], dict[str, Any]]


class ServerError(AssertionError):
    """The process that serves has ended."""


@dataclass(frozen=True)
class Server:
    """A process that runs `python -m module`, which calls `serve`, with this environment."""

    module: str
    environment: Callable[[], Mapping[str, str]]

    def call(
        self, folder: Path, function: Callable[..., Any], args: tuple, **more: Any
    ) -> dict[str, Any]:
        """What a fork answers; with "error" where it raised, or ended without an answer.

        Args:
            folder: of this call; what the function leaves there stays.
            more: what else the request has.
        """
        request = {
            "module": function.__module__,
            "name": function.__qualname__,
            "args": args,
            "cwd": os.getcwd(),
            "path": sys.path,
            **more,
        }
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        with self._connect() as connection:
            connection.sendall(f"{folder}\n".encode())
            code = connection.makefile().readline().strip()
        if not code:
            raise ServerError(f"the process of {self.module} ended; its error is on stderr")

        answer_file = folder / "answer.pickle"
        if not answer_file.exists():
            return {"error": f"exit code {code}"}
        return pickle.loads(answer_file.read_bytes())

    def _connect(self) -> socket.socket:
        run = os.environ.get(RUN, str(os.getpid()))
        # Of Linux's abstract addresses: no file is left behind, and one process can have it.
        address = f"\0{self.module} of the tests of {run}"
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(address)
        except OSError:
            # Another worker has started the server.
            pass
        else:
            listening.listen(64)
            self._start(listening, run)
        finally:
            listening.close()

        connection = socket.socket(socket.AF_UNIX)
        # The worker that has taken the address may not listen yet.
        wait_until(
            lambda: connection.connect_ex(address) == 0,
            10.0,
            lambda: f"nothing listens for calls of {self.module}; its error is on stderr",
        )
        return connection

    def _start(self, listening: socket.socket, run: str) -> None:
        """Calls wait in the queue of the socket until the process has imported everything."""
        number = listening.fileno()
        subprocess.Popen(
            [sys.executable, "-m", self.module, str(number), run],
            env={**self.environment()},
            stdin=subprocess.DEVNULL,
            pass_fds=[number],
        )


def serve(respond: RESPOND) -> None:
    """In the process: fork for each call until the run of tests ends.

    Args:
        respond: what the fork answers to a request, pickled.
    """
    number, run = map(int, sys.argv[1:])
    listening, ended = socket.socket(fileno=number), os.pidfd_open(run)
    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    while True:
        ready, _, _ = select.select([listening, ended], [], [])
        if ended in ready:
            return
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _wait_for_answer(connection, respond)
        connection.close()


def _wait_for_answer(connection: socket.socket, respond: RESPOND) -> None:
    """In a fork: have another one answer, and report how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = Path(connection.makefile().readline().strip())
    child = os.fork()
    if child == 0:
        connection.close()
        _answer(folder, respond)
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _answer(folder: Path, respond: RESPOND) -> None:
    """Leave the answer, and exit without tearing torch down."""
    # The first call that needs torch's pool of threads after a fork makes it anew, without a lock:
    # two threads that do so at once abort with "Invalid thread pool!".
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    try:
        request = pickle.loads((folder / "request.pickle").read_bytes())
        content = pickle.dumps(respond(request, folder))
    except BaseException:
        content = pickle.dumps({"error": traceback.format_exc()})

    try:
        (folder / "answer.pickle").write_bytes(content)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def requested(request: dict[str, Any]) -> Callable[..., Any]:
    """The function of a request, with the folder and the path that it has in the test."""
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    # pytest calls a test's file by its bare name, and so do we.
    function = importlib.import_module(request["module"])
    for name in request["name"].split("."):
        function = getattr(function, name)
    return function
