"""`run_interpreted` runs a function of a test in a process where Triton interprets kernels.

There `TRITON_INTERPRET=1` lets kernels run on CPU tensors, slowly. Triton 3.1 needs numpy 1 for
that: with numpy 2 its interpreter returns wrong values without an error. So numpy 1.26 comes first
on the path of that process, and the process begins with a kernel whose values are known.

One process serves all calls of a session and forks for each: a call takes milliseconds.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMPY_VERSION = "1.26.4"
# Where `make install` puts it (scripts/install_numpy1.sh), unless the environment names another.
NUMPY = Path(os.environ.get("OPENSORA_SP_NUMPY1") or Path(sys.prefix) / "numpy1")
ANSWERED = "answered"


class InterpreterError(AssertionError):
    """The function raised, or its process ended."""


class _Server:
    """The process, for all calls of a test session."""

    current: _Server | None = None

    def __init__(self) -> None:
        if not (NUMPY / "numpy").is_dir():
            raise InterpreterError(
                f"got no numpy {NUMPY_VERSION} in {NUMPY}; expected one beside that of the virtual "
                "environment, since Triton's interpreter is wrong with numpy 2; run `make install` "
                f"or sh scripts/install_numpy1.sh {sys.prefix}"
            )
        folders = [path for path in sys.path if path]
        env = os.environ | {
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(NUMPY), *folders]),
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.kill)
        self._read()

    @classmethod
    def get(cls) -> _Server:
        if cls.current is None or cls.current.process.poll() is not None:
            cls.current = cls()
        return cls.current

    def call(self, folder: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line != ANSWERED:
            raise InterpreterError(
                f"the process of the interpreter ended with {self.process.wait()} {line}; its "
                "error is on stderr"
            )


def run_interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a top-level function of a module, under the interpreter.

    Arguments and result are pickled. "triton" is set as the kernels that models take. Whatever the
    function raises comes back as `InterpreterError` with its traceback.
    """
    server = _Server.get()
    request = (function.__module__, function.__qualname__, args, os.getcwd(), sys.path)
    with tempfile.TemporaryDirectory(prefix="interpreter-") as name:
        folder = Path(name)
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        server.call(folder)

        answer_file = folder / "answer.pickle"
        if not answer_file.exists():
            raise InterpreterError(f"{function.__qualname__} ended its process")
        answer = pickle.loads(answer_file.read_bytes())
    if "error" in answer:
        raise InterpreterError(f"{function.__qualname__} failed interpreted\n{answer['error']}")
    return answer["result"]


def _serve() -> None:
    """In the process: check a known kernel, then fork for each line, the folder of a request."""
    import torch

    torch.set_num_threads(1)
    _check_canary()
    gc.collect()
    gc.freeze()

    answers = os.fdopen(os.dup(1), "w")
    # What tests print must not be read as an answer.
    os.dup2(2, 1)
    print(ANSWERED, file=answers, flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(Path(line.strip()))
        os.waitpid(child, 0)
        print(ANSWERED, file=answers, flush=True)


def _check_canary() -> None:
    """A kernel that copies must copy: an interpreter with the wrong numpy does not."""
    import numpy
    import torch
    from scaled_copy import launch

    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        copy = launch(x.to(dtype), 1.0)
        if not torch.equal(copy, x.to(dtype).float().to(dtype)):
            raise InterpreterError(
                f"got wrong values of a {dtype} copy kernel with numpy {numpy.__version__} from "
                f"{numpy.__file__}; expected a copy; Triton's interpreter needs numpy 1.26"
            )


def _answer(folder: Path) -> None:
    """In the fork: call, leave the answer, exit."""
    from opensora_sp.models.kernels import set_kernels

    answer: dict[str, Any] = {}
    try:
        request = pickle.loads((folder / "request.pickle").read_bytes())
        module, qualname, args, cwd, path = request
        os.chdir(cwd)
        sys.path[:] = [str(NUMPY), *path]
        set_kernels("triton")

        function = importlib.import_module(module)
        for name in qualname.split("."):
            function = getattr(function, name)
        answer["result"] = function(*args)
        content = pickle.dumps(answer)
    except BaseException:
        content = pickle.dumps({"error": traceback.format_exc()})

    (folder / "answer.pickle").write_bytes(content)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
