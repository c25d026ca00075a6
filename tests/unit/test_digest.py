"""Digests of tensors, by which ranks compare what they hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from opensora_sp.training.sync_check import PIECE, digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def some_tensors() -> list[Tensor]:
    """Of all dtypes, some empty, some transposed; values are random bits."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for dtype, shape in itertools.product(DTYPES, [(5, 3), (), (0, 4)]):
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
        tensors.append(data.view(dtype)[: torch.Size(shape).numel()].reshape(shape))
    return [*tensors, tensors[0].T]


def by_definition(tensor: Tensor) -> int:
    size = min(4, tensor.element_size())
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    words = tensor.reshape(-1).view(dtype).tolist()
    total = sum((2 * k + 1) * word for k, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("piece", [1, 4, 7, 1 << 16])
def test_the_digest_is_the_weighted_sum_however_it_is_computed(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE, "cpu", piece)
    for tensor in some_tensors():
        assert digest(tensor).dtype == torch.int64
        assert digest(tensor).item() == by_definition(tensor)


def test_every_bit_counts() -> None:
    for tensor in some_tensors():
        data, before = tensor.reshape(-1).clone(), digest(tensor).item()
        seen = {before}
        bits = 1 if tensor.dtype == torch.bool else 8
        for byte, bit in itertools.product(data.view(torch.uint8), range(bits)):
            byte ^= 1 << bit
            seen.add(digest(data).item())
            byte ^= 1 << bit
        assert digest(data).item() == before
        assert len(seen) == 1 + data.nbytes * bits
