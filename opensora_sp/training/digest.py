"""A digest of tensors: one number, which any flipped bit and any two swapped values change.

The bits of all elements are read as one sequence of integers ``x_0, x_1, ...``, and the digest is
the sum of ``(2k + 1) * x_k`` modulo 2**64. For up to 2**32 elements of up to four bytes:

* An element that changes by ``d`` changes the digest by ``(2k + 1) * d``. That is no multiple of
  2**64, because the first factor is odd and ``0 < |d| < 2**32``.
* Swapping elements ``k`` and ``l`` changes it by ``2 * (k - l) * (x_l - x_k)``. The factors
  contain two at most 32 and 31 times, so this is no multiple of 2**64 either.

Elements of eight bytes count as two of four bytes, so each flipped bit changes the digest as well.
Sums of integers do not depend on their order, and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Elements that are summed at a time, by the type of the device: few launches, or what caches hold.
# They take at most 20 bytes each beside the tensors, on CUDA 84 MB.
PIECE = {"cuda": 1 << 22, "cpu": 1 << 16}
# By the bytes of an element; larger ones are read as several integers.
_INTEGERS = {1: torch.int8, 2: torch.int16}


@torch.no_grad()
def digest(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The digest of tensors in their order, int64 ``[]`` on their device.

    The host does not wait for it. On CUDA it takes four kernels for each ``PIECE`` of elements.

    Args:
        tensors: all on one device.
        dtype: to which they are rounded before; None reads them as they are.
    """
    sums: list[Tensor] = []
    first = 0
    for piece in _pieces(tensors):
        values = torch.cat(piece)
        if dtype is not None:
            values = values.to(dtype)
        bits = values.view(_INTEGERS.get(values.element_size(), torch.int32))

        end = first + bits.numel()
        weights = torch.arange(2 * first + 1, 2 * end + 1, 2, device=bits.device)
        sums.append(weights.mul_(bits).sum())
        first = end
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Flat parts of the tensors in their order, of one dtype and ``PIECE`` elements or fewer."""
    piece: list[Tensor] = []
    for tensor in tensors:
        rest = tensor.reshape(-1)
        if piece and piece[0].dtype != rest.dtype:
            yield piece
            piece = []

        while rest.numel():
            room = PIECE[rest.device.type] - sum(part.numel() for part in piece)
            piece.append(rest[:room])
            rest = rest[room:]
            if piece[-1].numel() == room:
                yield piece
                piece = []

    if piece:
        yield piece
