"""The process under the stub: imports the project once, then forks for each call.

It reads the folder of a request from a line of stdin (`request.pickle` in it), and answers with a
line when `answer.pickle` is there or the child is gone. Each call has a fresh process in which CUDA
was never used, without the seconds that imports take.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = ("opensora_sp.training.run", "opensora_sp.sampling.run", "opensora_sp.plugin")


def main() -> None:
    # For this process and its forks the stub is loaded; compilers that they start go without.
    os.environ.pop("LD_PRELOAD", None)
    _preload()

    print("ready", flush=True)
    for line in sys.stdin:
        folder = Path(line.strip())
        child = os.fork()
        if child == 0:
            _serve(folder)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _preload() -> None:
    """Import what most tests need, without using CUDA: after that no fork could use it."""
    answers = {"is_available": True, "device_count": 1, "current_device": 0}
    answers["get_device_capability"] = (9, 0)
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=answer))
        for module in PRELOADED:
            importlib.import_module(module)

    # Collections of garbage in the children pass over what was imported.
    gc.collect()
    gc.freeze()


def _serve(folder: Path) -> None:
    """In the child: make the call, leave the answer, and exit without tearing torch down."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()

    answer = {}
    try:
        request = pickle.loads((folder / "request.pickle").read_bytes())
        faulthandler.enable()
        faulthandler.dump_traceback_later(request["timeout"], exit=True)
        answer = _answer(request, folder)
    except BaseException:
        answer["error"] = traceback.format_exc()

    try:
        (folder / "answer.pickle").write_bytes(pickle.dumps(answer))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    from cuda_stub.inside import Session

    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    # pytest calls a test's file by its bare name, and so do we.
    function = importlib.import_module(request["module"])
    for name in request["name"].split("."):
        function = getattr(function, name)

    session = Session(folder / "record", request["library"], function.__code__.co_filename)
    answer: dict[str, Any] = {}
    try:
        answer["result"] = function(*request["args"])
    except BaseException:
        answer["error"] = traceback.format_exc()
    answer["memory"] = session.close()
    answer["collectives"] = session.collectives
    return answer


if __name__ == "__main__":
    main()
