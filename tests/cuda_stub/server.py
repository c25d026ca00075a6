"""The process under the stub: imports the project once, then forks for each call (`served.py`).

Each call has a fresh process in which CUDA was never used.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from served import requested, serve

PRELOADED = ("opensora_sp.training.run", "opensora_sp.sampling.run", "opensora_sp.plugin")


def _preload() -> None:
    """Import what most tests need, without using CUDA: after that no fork could use it."""
    answers: dict[str, Any] = {"is_available": True, "device_count": 1, "current_device": 0}
    answers["get_device_capability"] = (9, 0)
    # torchao, which peft imports where it is installed, asks whether Triton would run.
    answers["get_device_properties"] = SimpleNamespace(major=9, minor=0)
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=answer))
        for module in PRELOADED:
            importlib.import_module(module)

    # Nothing is computed under the stub: the results of no kernel of attention can be compared.
    for module in ("opensora_sp.training.trainer", "opensora_sp.sampling.run"):
        importlib.import_module(module).choose_attention = lambda *args, **options: None

    # Collections of garbage in the children pass over what was imported.
    gc.collect()
    gc.freeze()


def _respond(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In the fork: make the call, and record what reaches CUDA."""
    from cuda_stub.inside import Session

    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["timeout"], exit=True)

    os.environ.update(request["env"])
    function = requested(request)
    library = Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"
    session = Session(folder / "record", library, function.__code__.co_filename)
    answer: dict[str, Any] = {}
    try:
        answer["result"] = function(*request["args"])
    except BaseException:
        answer["error"] = traceback.format_exc()
    answer["memory"] = session.close()
    answer["collectives"] = session.collectives
    return answer


if __name__ == "__main__":
    # For this process and its forks the stub is loaded; compilers that they start go without.
    os.environ.pop("LD_PRELOAD", None)
    _preload()
    serve(_respond)
