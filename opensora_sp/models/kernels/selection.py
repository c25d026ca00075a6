"""Which implementation of a kernel runs: the Triton kernel or plain torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

Kernels = Literal["auto", "triton", "torch"]

# Triton's interpreter runs kernels on the CPU, for tests. Triton reads this when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Plain objects: torch.compile makes guards of what it reads here, and compiles again if it changes.
_setting: Kernels = "auto"
_verified: dict[str, tuple[torch.dtype, ...]] = {}


def set_kernels(kernels: Kernels) -> None:
    """Set which kernels this process uses from now on.

    Args:
        kernels: "auto" takes Triton kernels on CUDA that were verified on this device
            (``opensora_sp.device_verification``), "triton" takes them without verification,
            "torch" takes none. Tensors in float64, which no Triton kernel computes, always take
            plain torch; ``check_kernels`` refuses "triton" for them.

    Raises:
        ValueError: for another name.
    """
    global _setting
    if kernels not in get_args(Kernels):
        raise ValueError(
            f"got kernels {kernels!r}; expected one of {', '.join(map(repr, get_args(Kernels)))}; "
            "correct it"
        )
    _setting = kernels


def check_kernels(kernels: str, device_type: str, dtype: torch.dtype) -> None:
    """Raise ValueError where ``kernels="triton"`` is asked for, and no Triton kernel would run.

    Args:
        dtype: of the tokens.
    """
    if kernels != "triton":
        return
    if device_type == "cuda" and dtype == torch.float64:
        raise ValueError(
            "got kernels='triton' for tokens in float64; expected float32, bfloat16 or float16, "
            "since Triton kernels compute in float32; set kernels='auto' or 'torch'"
        )
    if device_type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"got kernels 'triton' on a device of type {device_type!r}; expected a CUDA device, "
            "for which Triton compiles; set kernels='auto' or 'torch'"
        )


def current_kernels() -> Kernels:
    """The setting of ``set_kernels``."""
    return _setting


@contextmanager
def using_kernels(kernels: Kernels) -> Iterator[None]:
    """``set_kernels`` for the time of a ``with`` statement."""
    before = _setting
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def set_verified(name: str, dtypes: Iterable[torch.dtype]) -> None:
    """Set for which dtypes "auto" may take a Triton kernel."""
    _verified[name] = tuple(dtypes)


def chosen(name: str, like: Tensor) -> bool:
    """True if the Triton kernel of this name runs for tensors such as ``like``."""
    if _setting == "torch":
        return False

    # Fake tensors have the device that they stand for. Meta tensors stand for tensors of a GPU; the
    # planner traces its operators.
    if not (like.is_cuda or like.is_meta):
        return INTERPRETED and _setting == "triton" and like.device.type == "cpu"

    if like.dtype == torch.float64 or _is_transformed():
        return False
    return _setting == "triton" or like.dtype in _verified.get(name, ())


def _is_transformed() -> bool:
    """True inside ``torch.func`` (jvp, vmap, ...), which takes plain operations only."""
    compiles = torch.compiler.is_compiling()
    return not compiles and torch._C._functorch.peek_interpreter_stack() is not None
