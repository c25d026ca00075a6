"""A kernel "planted" without Triton, `y = factor * x`, with a fault of choice: for tests of
verification."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch

from opensora_sp.models.kernels import examples, fused
from opensora_sp.models.kernels.examples import Example, normal

PACKAGE = "opensora_sp.models.kernels"
SIZES = SimpleNamespace(hidden_size=72, num_heads=1, mlp_ratio=2.0)


def multiply(x, factor):
    return factor * x


def planted_examples(config):
    width = config.hidden_size
    arguments = dict(x=normal(3, width), factor=normal(width, seed=1))
    yield Example("multiply", arguments, gradients=("x", "factor"), kept=("factor",))


def wrong_value(x, factor):
    """One element of many."""
    y = factor * x
    changed = torch.zeros_like(y)
    changed[1, 2] = 1.0
    return y + changed


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return factor * x

    @staticmethod
    def backward(ctx, grad):
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum(0) * 1.2


def wrong_gradient(x, factor):
    return WrongGradient.apply(x, factor)


def no_number(x, factor):
    return factor * x + x[0, 0].detach() * float("nan")


def wrong_shape(x, factor):
    return (factor * x)[:, :-1]


def refuse(x, factor):
    raise RuntimeError("out of resource: shared memory\nand a page more")


FAULTS = {
    "none": multiply,
    "value": wrong_value,
    "gradient": wrong_gradient,
    "no number": no_number,
    "shape": wrong_shape,
    "error": refuse,
}


def plant(fault="none"):
    """Make the modules of the kernel, of which the one "by Triton" has a fault."""
    fused.multiply = multiply
    module = ModuleType(f"{PACKAGE}.triton.planted")
    module.multiply = FAULTS[fault]
    sys.modules[module.__name__] = module
    import_module(f"{PACKAGE}.triton").planted = module
    examples.EXAMPLES["planted"] = planted_examples
