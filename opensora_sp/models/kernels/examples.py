"""Calls by which a device's results of the kernels are verified.

They are small, with the widths of the model and an odd number of tokens. Dtypes, strides and
arguments that are left out are as in the models' calls (``tests/unit/test_kernel_calls.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention_table import HEAD_WIDTHS
from .fused import Part

if TYPE_CHECKING:
    from opensora_sp.models.stdit_config import SharedConfig


@dataclass(frozen=True)
class Example:
    """A call of a kernel's function.

    Args:
        function: its name, in ``fused.py`` and ``triton/<name>.py``.
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


def activations(*shape: int) -> Tensor:
    """Such numbers with a mean of 0.5, and with outliers: one in a hundred is ten times as large,
    as in trained models."""
    numbers = normal(*shape) + 0.5
    numbers.view(-1)[::101] *= 10
    return numbers


def kernel_names() -> list[str]:
    """The kernels, by name."""
    return sorted(EXAMPLES)


def examples_of(name: str, config: SharedConfig) -> Iterator[Example]:
    """The examples of a kernel."""
    yield from EXAMPLES[name](config)


def _gelu(config: SharedConfig) -> Iterator[Example]:
    """The hidden layer of blocks, also with more tokens than backward takes with one tile for each
    program. Without gradients another product may run, as in sampling."""
    hidden = int(config.hidden_size * config.mlp_ratio)
    for tokens, width in ((39, config.hidden_size), (1700, 16)):
        arguments = dict(
            x=normal(1, tokens, width),
            weight=normal(hidden, width, seed=1) / width**0.5,
            bias=normal(hidden, seed=2),
        )
        yield Example("linear_gelu", arguments, gradients=("x", "weight", "bias"))
        yield Example("linear_gelu", arguments)


def _short_rows(config: SharedConfig) -> Iterator[Example]:
    """Rows that are padded to 16 and to 32 tokens: of queries, keys and values side by side, and
    of queries and keys that a norm has written apart."""
    width = config.hidden_size // config.num_heads
    if width not in HEAD_WIDTHS:
        return

    for length in (15, 30):
        shape = 3, length, config.num_heads, width
        q, k, v = torch.stack([normal(*shape, seed=seed) for seed in range(3)], dim=2).unbind(2)
        for queries, keys in ((q, k), (q.contiguous(), k.contiguous())):
            arguments = dict(q=queries, k=keys, v=v)
            yield Example("attend_short_rows", arguments, gradients=("q", "k", "v"))


def _qk_norm(config: SharedConfig) -> Iterator[Example]:
    """Without rotation, with one for all rows, and with one for each of two long rows."""
    # More than the kernel's sums of weights' gradients add up at a time.
    long = 2**17 // config.hidden_size + 1
    for rows, length, rotated_rows in ((3, 13, 0), (3, 13, 1), (2, long, 2)):
        yield _heads(config, rows, length, rotated_rows)
    for rotated_rows in (0, 1, 3):
        yield _linear_heads(config, rotated_rows)


def _heads(config: SharedConfig, rows: int, length: int, rotated_rows: int) -> Example:
    heads, width = config.num_heads, config.hidden_size // config.num_heads
    rotation = None
    if rotated_rows:
        angles = 3 * normal(rotated_rows, length, 1, width // 2, seed=3)
        angles = torch.stack([-angles, angles], dim=-1).flatten(-2)
        rotation = torch.stack([angles.cos(), angles.sin()])
    return Example(
        "qk_norm",
        dict(
            qkv=activations(rows, length, 3, heads, width),
            q_weight=normal(width, seed=1),
            k_weight=normal(width, seed=2),
            rotation=rotation,
            eps=1e-6,
        ),
        gradients=("qkv", "q_weight", "k_weight"),
        kept=("rotation",),
    )


def _linear_heads(config: SharedConfig, rotated_rows: int) -> Example:
    """Attention leaves the gradients of queries token by token, or head by head."""
    example, inputs = _heads(config, 3, 13, rotated_rows), 64
    rows, length, *heads = example.arguments.pop("qkv").shape
    outputs = math.prod(heads)
    layer = dict(
        x=activations(rows, length, inputs),
        weight=normal(outputs, inputs, seed=3) / inputs**0.5,
        bias=normal(outputs, seed=4),
    )
    return replace(
        example,
        function="linear_qk_norm",
        arguments=layer | example.arguments,
        gradients=(*layer, "q_weight", "k_weight"),
        swapped={0: (1, 2)} if rotated_rows else {},
    )


def _modulation(config: SharedConfig) -> Iterator[Example]:
    """Calls as models make them, and without a bias, as where adapters stand in for layers.

    Entries of samples, of the frames of spatial rows and of temporal ones; tokens and gradients
    that lie in this layout or in the other one; all rows of samples, or some of them.
    """
    frames = (2, 3, 1)
    for per in ((1, 1, 1), (2, 1, 1), frames, (2, 1, 5)):
        for x_lies_across in (False, True):
            # A kernel that took one for the other would be wrong in either case.
            arguments = _modulated(config.hidden_size, per, x_lies_across=x_lies_across)
            yield from _modulation_calls(arguments, swapped={} if x_lies_across else ACROSS)
            # The final layer has a table apart, in the dtype of tokens.
            yield from _modulation_calls(arguments, "norm_modulate", kept=())

    arguments = _modulated(config.hidden_size, frames, first=2)
    yield from _modulation_calls(arguments)
    yield from _modulation_calls(arguments | dict(bias=None), swapped=ACROSS)

    # Entries and biases are frozen under LoRA.
    frozen = dict(gradients=("x", "branch"))
    yield from _modulation_calls(arguments, "add_gated", "add_gated_twice", **frozen)

    # Large and small shares, one of which has pieces of two entries, and more than the kernel
    # that adds their sums takes at a time.
    arguments = _modulated(config.hidden_size, (2, 1, 1), rows=(3, 161))
    yield from _modulation_calls(arguments, "add_norm_modulate")


# The gradient of the first output lies in the other layout.
ACROSS = {0: (0, 1)}
MODULATION = {
    "norm_modulate": ("x", "shift", "scale", "part"),
    "add_norm_modulate": ("x", "branch", "shift", "scale", "part", "bias"),
    "add_gated": ("x", "gate", "branch", "part", "bias"),
    "add_gated_twice": ("x", "gate", "branch", "part", "bias"),
}


def _modulation_calls(
    arguments: dict[str, Any], *functions: str, **changes: Any
) -> Iterator[Example]:
    """Calls of these functions, by default of all, with other fields of the examples."""
    for function in functions or MODULATION:
        given = {name: arguments[name] for name in MODULATION[function]}
        gradients = [name for name, argument in given.items() if isinstance(argument, Tensor)]
        example = Example(function, given, tuple(gradients), kept=("shift", "scale", "gate"))
        yield replace(example, **changes)


def _modulated(
    width: int,
    per: tuple[int, int, int],
    *,
    rows: tuple[int, int] = (3, 5),
    first: int = 0,
    x_lies_across: bool = False,
) -> dict[str, Any]:
    """Arguments for b samples with entries ``per`` of them, ``[b, 1 or n, 1 or L]``.

    Shift, scale and gate are cut out of one table, in float32. With ``first``, tokens are those
    from this row of the first sample to the same of the last one.
    """
    (sample_rows, length), samples = rows, per[0]
    shape = (samples - bool(first)) * sample_rows, length, width
    x, branch = normal(*shape), normal(*shape, seed=1)
    shift, scale, gate = normal(*per, 3, width, seed=2).unbind(-2)
    return dict(
        x=_across(x) if x_lies_across else x,
        branch=branch,
        bias=normal(width, seed=3),
        shift=shift,
        scale=scale,
        gate=gate,
        part=Part(first, sample_rows),
    )


def _across(x: Tensor) -> Tensor:
    """The same numbers, row by row of the other layout."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


EXAMPLES: dict[str, Callable[[SharedConfig], Iterator[Example]]] = {
    "gelu": _gelu,
    "modulation": _modulation,
    "qk_norm": _qk_norm,
    "short_rows": _short_rows,
}
