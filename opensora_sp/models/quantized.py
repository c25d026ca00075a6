"""Int8 weights of frozen linear layers, by torchao, for the training of adapters.

A weight ``[out, in]`` becomes int8 numbers and a float32 scale for each row. Products
take the dequantised weight, in plain torch on any device, and save the int8 one for backward. The
norms of DoRA are peft's own, which saves a whole weight where there is dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_sp.common.importing import check_extra

from .lora import DEFAULT_TARGETS, target_layers


class Int8Linear(nn.Linear):
    """A frozen linear layer whose ``weight`` is torchao's ``Int8Tensor``.

    It is no plain ``Linear``, so kernels that read a layer's weight leave it alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``, in the dtype of ``x``."""
        out: Tensor = _Int8Product.apply(x, self.weight, self.bias)
        return out


def quantize_blocks(model: nn.Module) -> None:
    """Freeze a bare model and quantise the weights of its blocks' linear layers, in place.

    Weights are rounded to nearest, relative to the largest of each row. Other parameters, such as
    biases and norms, keep their dtype. A later cast of the model leaves int8 weights and their
    scales as they are.

    Raises:
        ValueError: if torchao is not installed.
    """
    check_extra("quantized", "torchao", setting="lora.quantize", instead="remove lora.quantize")
    # Imports torchao, an optional dependency that takes a second.
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model.requires_grad_(False)
    # The layers of blocks hold nearly all weights of a model.
    for name in target_layers(model, DEFAULT_TARGETS):
        layer = model.get_submodule(name)
        # It sets options of the compiler otherwise, for the whole process.
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        layer.__class__ = Int8Linear


def stored_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that hold a parameter, by suffixes of its name: int8 weights have several.

    A plain tensor is itself, with the suffix "".
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor}
    names, _ = tensor.__tensor_flatten__()
    return {f".{name}": getattr(tensor, name) for name in names}


def dequantized(weight: Any, dtype: torch.dtype) -> Tensor:
    """An ``Int8Tensor`` as floating-point numbers, which are computed in float32."""
    wide: Tensor = weight.qdata * weight.scale
    return wide.to(dtype)


class _Int8Product(torch.autograd.Function):
    """``F.linear`` with a frozen int8 weight and bias.

    torchao's own product would save the whole weight in the dtype of the tokens for backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, dequantized(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ dequantized(weight, grad.dtype), None, None
