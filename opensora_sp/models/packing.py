"""Packed tokens: which tokens attend to each other, and how kernels split the work.

A ``Packing`` has the numbers of queries and keys that belong together. It is made once per forward
and shared by all blocks, so that no block copies anything to the device. ``Groups`` are the tokens
of rows, windows of patches or whole clips that attend to each other. Tokens of a group lie next to
each other, so the lengths of the groups, host integers, describe them all. Tokens outside of their
clip are excluded by an index of the others. So no tensor here is larger than one number per token.

Legend: B samples, N packed tokens, P pieces, L keys of a piece, H heads, D head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device

# Queries and keys that a block of threads works on at a time.
TILE = 128
# Queries of a sample that a piece has at most.
PIECE = 1024
# Kernels count rows or pieces along an axis of CUDA's grid that ends here.
MAX_ROWS = 65_535

# Queries and keys of each sample.
Lengths = tuple[Sequence[int], Sequence[int]]


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
        # Blocks of threads in backward: by head and tile of keys.
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
            # Both in one copy, which is queued once for all blocks of the model.
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
    # (keys, pieces) of each sample.
    samples: tuple[tuple[int, int], ...]

    @cached_property
    def are_equal(self) -> bool:
        """True if all have the same lengths, so that they are rows of a tensor."""
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
            for sample, (_, pieces) in samples:
                parts += sample.expand(pieces, *sample.shape).unbind()
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


@dataclass(frozen=True, eq=False)
class Windows:
    """A partition of a frame's patches into windows, which attend through all frames.

    The windows at the lower and right border may be smaller.
    """

    # The patches, window by window.
    order: tuple[int, ...]
    sizes: tuple[int, ...]  # patches of each window


@lru_cache(maxsize=256)
def windows_of(height: int, width: int, kernel: tuple[int, int]) -> Windows:
    """Windows of ``kernel`` patches, -1 for all, on ``height`` x ``width`` patches.

    The same object every time.
    """
    lines, columns = (n if k < 0 else k for n, k in zip((height, width), kernel, strict=True))

    def window(patch: int) -> tuple[int, int]:
        return patch // width // lines, patch % width // columns

    # Sorting is stable, so patches stay line by line within a window.
    order = sorted(range(height * width), key=window)
    return Windows(tuple(order), tuple(Counter(map(window, order)).values()))


@dataclass(frozen=True, eq=False)
class VideoMask:
    """The latent positions inside of each clip, where clips of different sizes share a batch."""

    # Bool [B, frames, height, width], on the device of the latents.
    positions: Tensor
    patch_size: tuple[int, int, int]
    # The same on the CPU, where tokens are counted.
    on_host: Tensor

    @classmethod
    def of(cls, mask: Tensor, patch_size: tuple[int, int, int], device: torch.device) -> VideoMask:
        """A mask for latents on ``device``. One that is not on the CPU is read back."""
        return cls(to_device(mask, device), patch_size, mask.cpu())

    def on(self, device: torch.device) -> Tensor:
        """``positions`` on the device of the latents or on the CPU."""
        return self.on_host if device.type == "cpu" else self.positions

    def frame_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each clip in patches, at least 1: its last line and column inside."""
        _, ph, pw = self.patch_size
        heights, widths = self._last_inside(dim=2), self._last_inside(dim=1)
        sizes = zip(heights, widths, strict=True)
        return [(max(1, -(-h // ph)), max(1, -(-w // pw))) for h, w in sizes]

    def _last_inside(self, dim: int) -> list[int]:
        """1 + the last line (``dim`` 2 reduced) or column inside of each clip, 0 without any."""
        inside = self.on_host.any(dim=1).any(dim=dim)  # [B, height] or [B, width]
        numbers = torch.arange(1, inside.shape[1] + 1)
        return (inside * numbers).amax(1).tolist()


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of tokens, next to each other in their order, that attend to each other.

    ``packing`` has the tokens of each group. With an ``index``, int64, the tokens are those at
    these places, and the others take no part. ``are_rows``: each row attends to itself, all of it.
    """

    # Not as a list: compiled code would be compiled again for each number of groups.
    packing: Packing
    index: Tensor | None = None
    are_rows: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], index: Tensor | None = None) -> Groups:
        """Groups of these numbers of tokens."""
        return cls(Packing(lengths, lengths), index)

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each group."""
        return self.packing.queries


ROWS = Groups(Packing([], []), are_rows=True)


class RowTables(NamedTuple):
    """What a self-attention reads of its rows, computed once for all blocks.

    Attributes:
        rotation: by which a rotary embedding rotates queries and keys.
        groups: tokens that attend to each other; None if parts of these rows attend elsewhere.
    """

    rotation: Tensor | None = None
    groups: Groups | None = None
