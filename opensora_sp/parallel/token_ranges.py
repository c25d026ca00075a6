"""The tokens of each rank where a sequence is cut in ranges, stream by stream.

A stream, such as video or text, has any number of tokens, and each rank a balanced range of them. A
rank without tokens of a stream sees one made-up token, since modules of any kind need not accept
none; what comes of it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from typing import TypeAlias

import torch
from torch import Tensor

from .layout import balanced_range, balanced_sizes

Streams: TypeAlias = tuple[str, ...]
"""Streams that a tensor has the tokens of, in this order."""


class TokenRanges:
    """The ranges of one rank in all streams of a forward pass; ``lengths`` are their tokens."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self.lengths: dict[str, int] = {}

    def counts(self, streams: Streams) -> tuple[int, ...]:
        """The tokens of these streams on each rank."""
        sizes = [balanced_sizes(self.lengths[stream], self.num_ranks) for stream in streams]
        return tuple(map(sum, zip(*sizes, strict=True)))

    def num_seen(self, streams: Streams) -> int:
        """The tokens of these streams that modules see on this rank."""
        return sum(self._seen(streams))

    def combinations(self, order: Sequence[str]) -> list[Streams]:
        """All sets of streams that a tensor may have the tokens of."""
        known = [stream for stream in order if stream in self.lengths]
        return [*chain(*(combinations(known, n + 1) for n in range(len(known))))]

    def cut(self, x: Tensor, axis: int) -> Tensor:
        """This rank's range of a stream."""
        length = x.shape[axis]
        start, stop = balanced_range(length, self.num_ranks, self.rank)
        if start == stop and length:
            start = min(start, length - 1)
            stop = start + 1
        return x.narrow(axis, start, stop - start)

    def without_made_up(self, x: Tensor, axis: int, streams: Streams) -> Tensor:
        """The tokens of this rank alone."""
        sizes, seen = self._sizes(streams), self._seen(streams)
        if sizes == seen:
            return x
        parts = zip(x.split(seen, axis), sizes, strict=True)
        return torch.cat([part.narrow(axis, 0, size) for part, size in parts], axis)

    def with_made_up(self, x: Tensor, axis: int, streams: Streams) -> Tensor:
        """The tokens of this rank, and zeros for made-up ones."""
        sizes, seen = self._sizes(streams), self._seen(streams)
        if sizes == seen:
            return x
        parts: list[Tensor] = []
        for part, number in zip(x.split(sizes, axis), seen, strict=True):
            shape = [*x.shape[:axis], number - part.shape[axis], *x.shape[axis + 1 :]]
            parts += [part, x.new_zeros(shape)]
        return torch.cat(parts, axis)

    def _sizes(self, streams: Streams) -> list[int]:
        return [self.counts((stream,))[self.rank] for stream in streams]

    def _seen(self, streams: Streams) -> list[int]:
        lengths = [self.lengths[stream] for stream in streams]
        sizes = zip(self._sizes(streams), lengths, strict=True)
        return [size or min(length, 1) for size, length in sizes]
