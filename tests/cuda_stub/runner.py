"""`run_on_stub` runs a function of a test in a process under the stub."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cuda_stub import build
from cuda_stub.recording import Recording, read

TESTS = Path(__file__).parents[1]
REASON = build.why_not()
requires_stub = pytest.mark.skipif(REASON is not None, reason=REASON or "")


class StubError(AssertionError):
    """The function raised, crashed, timed out, or called what the stub does not implement."""


class Server:
    """One process under the stub, for all calls of a test session (`server.py`)."""

    current: Server | None = None

    def __init__(self) -> None:
        self.library = build.library() / "libcuda.so.1"
        folder = str(self.library.parent)
        # Arguments are unpickled there, so the folders of tests are on its path as they are here.
        folders = [path for path in sys.path if path.startswith(str(TESTS))]
        paths = [*folders, os.environ.get("PYTHONPATH", "")]
        libraries = [folder, os.environ.get("LD_LIBRARY_PATH", "")]
        env = os.environ | {
            "LD_PRELOAD": str(self.library),
            "TRITON_LIBCUDA_PATH": folder,
            "LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # Compile in the process that loads the stub, not in workers.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        env.pop("CUDA_VISIBLE_DEVICES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cuda_stub.server"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.kill)
        self._read()

    @classmethod
    def get(cls) -> Server:
        if cls.current is None or cls.current.process.poll() is not None:
            cls.current = cls()
        return cls.current

    def call(self, folder: Path) -> int:
        """Run the request in `folder`; the exit code of the process that did."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise StubError(f"the process under the stub ended with {self.process.wait()}")
        return line


def run_on_stub(
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    memory: int | None = None,
    allow: Sequence[str] = (),
) -> Recording:
    """Run `function(*args)`, a top-level function of a module, in a process of its own.

    `memory` is the device's, in bytes; `env` is set before anything but torch is imported. Whatever
    the function raises comes back as `StubError` with its traceback. So does a call that the stub
    does not implement, even where the function did not fail from it, unless `allow` names it.
    """
    server = Server.get()
    extra = {"CUDA_STUB_MEMORY": str(memory)} if memory is not None else {}
    request = {
        "module": function.__module__,
        "name": function.__qualname__,
        "args": args,
        "timeout": timeout,
        "env": dict(env or {}) | extra,
        "cwd": os.getcwd(),
        "path": sys.path,
        "library": server.library,
    }

    with tempfile.TemporaryDirectory(prefix="cuda_stub-") as name:
        folder = Path(name)
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        code = server.call(folder)
        return _recording(folder, code, function, allow)


def _recording(
    folder: Path, code: int, function: Callable[..., Any], allow: Sequence[str]
) -> Recording:
    record, answer_file = folder / "record", folder / "answer.pickle"
    recording = read(record) if record.exists() else Recording()
    recording.output = (folder / "output").read_text(errors="replace")

    answer = pickle.loads(answer_file.read_bytes()) if answer_file.exists() else {}
    error = answer.get("error") or ("" if answer else f"exit code {code}")
    unknown = [call for call in recording.unknown if call.split(" ")[0] not in allow]
    if error or unknown:
        calls = "".join(f"\nnot implemented by the stub: {call}" for call in unknown)
        raise StubError(
            f"{function.__module__}.{function.__qualname__} failed on the stub\n{error}{calls}\n"
            f"its output ended with:\n{recording.output[-3000:]}"
        )

    recording.result = answer["result"]
    recording.memory = answer["memory"]
    recording.collectives = answer["collectives"]
    return recording
