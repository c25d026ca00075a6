"""`run_interpreted` runs a function of a test in a process where Triton interprets kernels.

There `TRITON_INTERPRET=1` lets kernels run on CPU tensors, slowly. The interpreter computes with
numpy, and with some versions of it returns wrong values without an error. So the process begins
with a kernel whose values are known.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from served import Server, requested, serve


class InterpreterError(AssertionError):
    """The function raised, or its process ended."""


def _environment() -> dict[str, str]:
    folders = [path for path in sys.path if path]
    return os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}


SERVER = Server("interpreter", _environment)


def run_interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a top-level function of a module, under the interpreter.

    Arguments and result are pickled. "triton" is set as the kernels that models take. Whatever the
    function raises comes back as `InterpreterError` with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="interpreter-") as name:
        answer = SERVER.call(Path(name), function, args)
    if "error" in answer:
        raise InterpreterError(f"{function.__qualname__} failed interpreted\n{answer['error']}")
    return answer["result"]


def _respond(request: dict[str, Any], _: Path) -> dict[str, Any]:
    from opensora_sp.models.kernels import set_kernels

    function = requested(request)
    set_kernels("triton")
    return {"result": function(*request["args"])}


def _check_canary() -> None:
    """Kernels that copy must copy: with the wrong numpy they do not."""
    import numpy
    import torch
    import triton
    from scaled_copy import BLOCK, copy_in_loop_kernel, launch

    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    failure = None
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            source, in_loop = x.to(dtype), torch.zeros(3000, dtype=dtype)
            copy_in_loop_kernel[(1,)](source, in_loop, 3000, BLOCK=BLOCK)
            for copy in (launch(source, 1.0), in_loop):
                if not torch.equal(copy, source.float().to(dtype)):
                    failure = f"wrong values of a {dtype} copy kernel"
    except triton.runtime.errors.InterpreterError as error:
        failure = f"{error.__cause__!r} from a copy kernel"
    if failure:
        raise InterpreterError(
            f"got {failure}, interpreted by Triton {triton.__version__} with numpy "
            f"{numpy.__version__}; expected a copy; install Triton 3.8, or numpy before 2.4"
        )


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    _check_canary()
    gc.collect()
    gc.freeze()
    serve(_respond)
