"""`run_on_stub` runs a function of a test in a process under the stub."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from served import Server

from cuda_stub import build
from cuda_stub.recording import Recording, read

TESTS = Path(__file__).parents[1]
REASON = build.why_not()
requires_stub = pytest.mark.skipif(REASON is not None, reason=REASON or "")


class StubError(AssertionError):
    """The function raised, crashed, timed out, or called what the stub does not implement."""


def _environment() -> dict[str, str]:
    library = build.library() / "libcuda.so.1"
    folder = str(library.parent)
    # Arguments are unpickled there, so the folders of tests are on its path as they are here.
    folders = [path for path in sys.path if path.startswith(str(TESTS))]
    paths = [*folders, os.environ.get("PYTHONPATH", "")]
    libraries = [folder, os.environ.get("LD_LIBRARY_PATH", "")]
    env = os.environ | {
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": folder,
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # The stub's cuDNN is older than the headers that torch was compiled with.
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",
    }
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return env


SERVER = Server("cuda_stub.server", _environment)


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
    extra = {"CUDA_STUB_MEMORY": str(memory)} if memory is not None else {}
    own = dict(env or {}) | extra
    with tempfile.TemporaryDirectory(prefix="cuda_stub-") as name:
        folder = Path(name)
        answer = SERVER.call(folder, function, args, timeout=timeout, env=own)
        return _recording(folder, answer, function, allow)


def _recording(
    folder: Path, answer: dict[str, Any], function: Callable[..., Any], allow: Sequence[str]
) -> Recording:
    record = folder / "record"
    recording = read(record) if record.exists() else Recording()
    recording.output = (folder / "output").read_text(errors="replace")

    error = answer.get("error", "")
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
