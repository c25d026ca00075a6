"""Packed tokens: how many queries and keys belong together, and how kernels split the work.

A ``Packing`` is made once per forward and shared by all blocks, so that no block copies anything to
the device.

Legend: N packed tokens, P pieces, L keys of a piece, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device

TILE = 128  # queries and keys that a block of threads works on at a time
PIECE = 1024  # queries of a sample that a piece has at most
MAX_ROWS = 65_535  # kernels count rows or pieces along an axis of CUDA's grid that ends here

Lengths = tuple[Sequence[int], Sequence[int]]  # queries and keys of each sample


class Packing:
    """The numbers of queries and keys of each sample, host integers."""

    def __init__(self, queries: Sequence[int], keys: Sequence[int]) -> None:
        assert len(queries) == len(keys), (len(queries), len(keys))
        self.queries, self.keys = tuple(queries), tuple(keys)
        self._pieces: dict[tuple[int, int], Pieces] = {}

    def pieces(self, heads: int, processors: int) -> Pieces:
        """The queries cut into pieces, for a device of that many multiprocessors."""
        key = heads, processors
        if key not in self._pieces:
            self._pieces[key] = self._cut(heads, processors)
        return self._pieces[key]

    def _cut(self, heads: int, processors: int) -> Pieces:
        """As many pieces as keep all multiprocessors busy."""
        samples = list(zip(self.queries, self.keys, strict=True))
        tiles = sum(-(-keys // TILE) for queries, keys in samples if queries)
        wanted = -(-processors // max(1, heads * tiles))

        cut = [_cut(queries, keys, wanted) for queries, keys in samples]
        counts = [len(sizes) for sizes in cut]
        return Pieces(
            queries=tuple(chain.from_iterable(cut)),
            keys=tuple(chain.from_iterable(map(repeat, self.keys, counts))),
            samples=tuple(zip(self.keys, counts, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a kernel for packed tokens: the queries and keys of each of its pieces."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    _edges: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest piece."""
        return max(self.queries), max(self.keys)

    def edges(self, device: torch.device) -> tuple[Tensor, ...]:
        """Where queries and where keys of each piece begin, and the end: int32 ``[P + 1]`` each."""
        if device not in self._edges:
            sums = [*accumulate(self.queries, initial=0), *accumulate(self.keys, initial=0)]
            edges = to_device(torch.tensor(sums, dtype=torch.int32), device)
            self._edges[device] = edges.chunk(2)
        return self._edges[device]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Queries in pieces of ``queries`` tokens, each with the ``keys`` of its sample.

    Kernels start blocks of threads by piece, head and, in backward, tile of keys. A long sample
    with few keys would leave most of a GPU idle: 300 keys and 16 heads are 48 blocks.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    samples: tuple[tuple[int, int], ...]  # (keys, pieces) of each sample

    @cached_property
    def are_equal(self) -> bool:
        """Whether all have the same lengths, so that they are rows of a tensor."""
        return len(set(zip(self.queries, self.keys, strict=True))) == 1

    @cached_property
    def calls(self) -> list[Call]:
        """Calls of at most ``MAX_ROWS`` pieces each."""
        starts = range(0, len(self.queries), MAX_ROWS)
        return [Call(self.queries[i : i + MAX_ROWS], self.keys[i : i + MAX_ROWS]) for i in starts]

    def repeat(self, z: Tensor) -> Tensor:
        """Keys or values ``[N, H, D]`` of the samples, repeated for their pieces.

        Returns:
            ``[P, L, H, D]`` if the pieces are equal, else packed. One sample is not copied: its
            pieces share the same memory.
        """
        if len(set(self.samples)) == 1 and self.are_equal:
            keys, pieces = self.samples[0]
            z = z.unflatten(0, (len(self.samples), 1, keys))
            return z.expand(-1, pieces, -1, -1, -1).flatten(0, 1)
        if any(pieces != 1 for _, pieces in self.samples):
            # The gradients of expanded keys are summed with one rounding.
            parts: list[Tensor] = []
            samples = zip(z.split([keys for keys, _ in self.samples]), self.samples, strict=True)
            for own, (_, pieces) in samples:
                parts += own.expand(pieces, *own.shape).unbind()
            z = torch.cat(parts)
        return z.unflatten(0, (len(self.keys), -1)) if self.are_equal else z


def _cut(queries: int, keys: int, wanted: int) -> list[int]:
    """The sizes of a sample's pieces, equal if that is possible with less than twice as many."""
    if not queries:
        return []
    least = max(-(-queries // PIECE), min(wanted, queries // TILE))
    if least < 2 or keys >= queries:
        return [queries]

    count = next((n for n in range(least, 2 * least) if queries % n == 0), least)
    edges = [queries * i // count for i in range(count + 1)]
    return [stop - start for start, stop in pairwise(edges)]
