"""Calls by which a device's results of a Triton kernel are verified.

Each module of ``reference`` has a function ``examples(sizes)`` that yields some for each of its
functions: small ones, with the widths of the model and an odd number of tokens. Dtypes, strides and
what is left out are those of the models' calls (``tests/unit/test_kernel_calls.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference

if TYPE_CHECKING:
    from opensora_sp.models.config import SharedConfig


@dataclass(frozen=True)
class Sizes:
    """Widths of a model: of tokens, of a head, and of the MLP's hidden layer."""

    width: int
    heads: int
    hidden: int

    @classmethod
    def of(cls, config: SharedConfig) -> Sizes:
        """Of an STDiT model's config."""
        hidden = int(config.hidden_size * config.mlp_ratio)
        return cls(config.hidden_size, config.num_heads, hidden)

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Example:
    """A call of a kernel's function.

    Args:
        function: its name, in ``reference/<name>.py`` and ``triton/<name>.py``.
        arguments: by name. Floating tensors are float32 on the CPU; they are moved to the device
            and cast to the dtype that is verified, with the strides that they have.
        gradients: names of the tensors whose gradients are compared too. Without any, the call is
            made in no-grad mode.
        kept: names of the tensors that keep their dtype.
        swapped: by the number of an output, two of its dims that are swapped in memory in the
            gradient which backward gets. Others are contiguous.
    """

    function: str
    arguments: dict[str, Any]
    gradients: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    swapped: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random float32 numbers of a normal distribution on the CPU, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu")


def activations(*shape: int, seed: int = 0) -> Tensor:
    """Such numbers with a mean of 0.5, and with outliers: one in a hundred is ten times as large,
    as in trained models."""
    drawn = normal(*shape, seed=seed) + 0.5
    drawn.view(-1)[seed::101] *= 10
    return drawn


def kernel_names() -> list[str]:
    """The kernels, by name: the modules of ``reference``."""
    return sorted(module.name for module in iter_modules(reference.__path__))


def examples_of(name: str, sizes: Sizes) -> Iterator[Example]:
    """The examples of a kernel."""
    module: Any = import_module(f"{reference.__name__}.{name}")
    yield from module.examples(sizes)
