"""Each attention backend that this host has, against an explicit softmax in float64 on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from opensora_sp.models.attention import BACKENDS, attention, choose_backend
from opensora_sp.models.packing import Lengths

from .measurements import Finding, Setup, relative_error

# Tokens of 3 heads; a width of 72 is XL/2's, and 131 tokens are no multiple of a kernel's tile.
SHAPES: dict[str, tuple[tuple[int, ...], Lengths | None]] = {
    "rows": ((6, 131, 3, 72), None),
    "packed": ((120, 3, 72), ((50, 0, 70), (60, 20, 40))),
}

# Kernels in bf16 round the softmax's weights, the output and each gradient once or twice to 8 bits
# (at most 0.4 % each); in fp32 the order of sums remains of 131 terms.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def check_attention(setup: Setup) -> Iterator[Finding]:
    """Forward and backward of every backend, dtype and shape."""
    for backend, dtype in product(BACKENDS, BOUNDS):
        label = f"attention {backend}, {str(dtype).removeprefix('torch.')}"
        try:
            chosen = choose_backend(backend, setup.device, dtype, 72, length=SHAPES["rows"][0][1])
        except ValueError as error:
            yield Finding.skip(label, str(error).partition("; ")[0].removeprefix("got "))
            continue

        for shape in SHAPES:
            try:
                largest = _max_error(backend, dtype, shape, setup)
            # A kernel may raise anything; others still run.
            except Exception as raised:
                yield Finding.of_error(f"{label}, {shape}", raised)
                continue
            yield Finding(f"{label}, {shape}", largest, BOUNDS[dtype], note=f"runs {chosen}")


def _max_error(backend: str, dtype: torch.dtype, shape: str, setup: Setup) -> float:
    """The largest relative error of the output and of three gradients; NaN if one of them is."""
    size, lengths = SHAPES[shape]
    draw = torch.Generator().manual_seed(2)
    q, k, v, weights = (torch.randn(size, generator=draw).to(dtype) for _ in range(4))

    def run(device: torch.device, dtype: torch.dtype, backend: str) -> list[Tensor]:
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (q, k, v)]
        output = attention(*inputs, lengths=lengths, backend=backend)
        return [output, *torch.autograd.grad(output, inputs, weights.to(device, dtype))]

    results = run(setup.device, dtype, backend)
    exact = run(torch.device("cpu"), torch.float64, "reference")
    errors = [relative_error(*pair) for pair in zip(results, exact, strict=True)]
    return torch.tensor(errors).max().item()
