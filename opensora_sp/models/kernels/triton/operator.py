"""Torch operators made of functions that launch kernels.

``torch.compile``, fake tensors and selective checkpointing see one node, ``opensora_sp::<name>``.
The autograd functions of this package call them, one in forward and one in backward. So they are
registered below autograd, by ``torch.library.Library``: what ``custom_op`` adds to a call takes the
host about as long as to launch the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.graphs import uncompiled

Function = Callable[..., Any]

_LIBRARY = torch.library.Library("opensora_sp", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def opaque_operator(name: str, function: Function, fake: Function) -> Function:
    """The torch operator ``opensora_sp::<name>``, without a gradient.

    It launches on the device of its first argument, whatever the current device is. An autograd
    function calls it, in forward and in backward. Differentiating that backward again raises a
    RuntimeError, and so does calling the operator where it would have to be differentiated.

    Args:
        function: launches kernels. The first parameter is a tensor. Parameters and results have
            types that ``torch.library.infer_schema`` knows; no result shares memory with an
            argument or with another result.
        fake: the same signature; allocates the results without computing.
    """

    # What a graph calls is not compiled in turn.
    @uncompiled
    @wraps(function)
    def on_device(first: Tensor, *args: Any) -> Any:
        if torch.is_grad_enabled() and _need_gradients(first, *args):
            raise RuntimeError(
                f"got a second derivative of the Triton kernel {name!r}; expected first "
                "derivatives alone; set kernels='torch'"
            )
        # Triton launches on the current device and its stream. Does nothing on a CPU.
        with torch.cuda.device_of(first):
            return function(first, *args)

    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=_TAGS)
    # On a CPU Triton's interpreter runs them.
    for device in ("CUDA", "CPU"):
        _LIBRARY.impl(name, on_device, device)
    torch.library.register_fake(f"opensora_sp::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.opensora_sp, name).default


def _need_gradients(*args: Any) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
