"""Inputs of blocks in pinned host memory, from forward until backward.

A block that recomputes everything keeps its input alone. Where the device has no room for these
either, they wait on the host, as vDNN (Rhu et al., 2016) does with activations. Copies run on a
stream of their own, beside the computation::

    forward    compute    block 0 | block 1 | block 2
               copies     input 0 out | input 1 out | input 2 out
    backward   compute    block 2 | block 1 | block 0
               copies     input 1 back | input 0 back

An input leaves the device when the next block begins, whose stream first waits for the copy. It
comes back one block ahead. So the device holds two inputs at a time, whatever the depth.

Order is kept by events and by the copies' stream alone. ``record_stream`` would order as well, but
the host runs ahead of the device: memory would be free only when a copy is seen to be complete, so
that the peak would depend on time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

PAGE = 32 * 1024**2
"""Bytes that are pinned at a time, at most. Torch rounds what it pins up to a power of two."""
SIZES = 6  # of pages: PAGE, half of it and so on

Copied: TypeAlias = "torch.cuda.Event | None"
"""When a copy is complete; None for at once."""


def input_on_host(tokens: Tensor) -> saved_tensors_hooks:
    """A context in which autograd saves ``tokens`` on the host, until backward needs them.

    On a CPU they are copied as well, which saves nothing.
    """
    # These functions live as long as the graph, and must not hold the tokens.
    memory, shape = host_memory(tokens.device), tokens.shape

    def pack(saved: Tensor) -> Tensor | HostedInput:
        # Other arguments of a block, such as a number for each sample, are small.
        return HostedInput(saved.detach(), memory) if saved.shape == shape else saved

    def unpack(packed: Tensor | HostedInput) -> Tensor:
        return packed.take() if isinstance(packed, HostedInput) else packed

    return saved_tensors_hooks(pack, unpack)


class HostMemory:
    """Pages of pinned memory for the tensors of a device, and the stream that copies them.

    A page is reused in the order of that stream, so nothing has to wait before it is free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.newest: Callable[[], HostedInput | None] = lambda: None
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size
        self._pinned = 0  # bytes, in use or free
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take_pages(self, tokens: Tensor) -> list[Tensor]:
        """Pages for a tensor; none for one without data, on the meta device."""
        if tokens.is_meta:
            return []
        sizes = page_sizes(tokens.nbytes)
        return [
            self._free[size].pop() if self._free[size] else self._new_page(size) for size in sizes
        ]

    def free(self, pages: Sequence[Tensor]) -> None:
        for page in pages:
            self._free[len(page)].append(page)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Copied:
        """Copy as many bytes as the smaller of each pair has, after what is queued until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=False):
                size = min(len(target), len(source))
                target[:size].copy_(source[:size], non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def wait(self, copied: Copied) -> None:
        """Let the current stream wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _new_page(self, size: int) -> Tensor:
        try:
            page = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        except RuntimeError as error:
            raise RuntimeError(
                f"got no {size / 1e6:.1f} MB of pinned memory from the host for inputs of blocks, "
                f"beside {self._pinned / 1e9:.3f} GB that this process has pinned; expected room "
                "for the inputs of all blocks that are kept there; share the batch among more "
                "ranks, start fewer processes on this host, or set grad_checkpoint=True"
            ) from error
        self._pinned += size
        return page


@cache
def host_memory(device: torch.device) -> HostMemory:
    """The one of a device, for all models of this process."""
    return HostMemory(device)


class HostedInput:
    """The input of one block: on the host and, while it is copied or soon needed, on the device."""

    _on_device: Tensor | None = None
    _pages: Sequence[Tensor] = ()

    def __init__(self, tokens: Tensor, memory: HostMemory) -> None:
        self._memory = memory
        self._before, memory.newest = memory.newest, weakref.ref(self)
        before = self._before()
        if before is not None:
            before._check_unchanged()
            before._leave_device()

        self._shape, self._dtype = tokens.shape, tokens.dtype
        self._pages = memory.take_pages(tokens)
        self._on_device = tokens.contiguous()
        self._version = self._on_device._version
        self._copied = memory.copy(self._pages, in_pieces(self._on_device))

    def take(self) -> Tensor:
        """The tokens on the device, and start to copy those of the block before, which is next."""
        tokens = self._fetch()
        self._check_unchanged()
        self._leave_device()
        before = self._before()
        if before is not None:
            before._fetch()
        return tokens

    def _fetch(self) -> Tensor:
        if self._on_device is None:
            # Of the current stream, so that its memory is reused in the order of that stream.
            self._on_device = torch.empty(
                self._shape, dtype=self._dtype, device=self._memory.device
            )
            self._copied = self._memory.copy(in_pieces(self._on_device), self._pages)
            self._version = self._on_device._version
        return self._on_device

    def _check_unchanged(self) -> None:
        """As autograd checks what it saves, which does not know of tensors on the host."""
        if self._on_device is not None and self._on_device._version != self._version:
            raise RuntimeError(
                f"got the input {tuple(self._shape)} of a block, changed in place while it was "
                "copied to the host; expected what forward computed with; change a clone of it"
            )

    def _leave_device(self) -> None:
        """Give the device's memory up: what follows on the current stream may use it."""
        if self._on_device is not None:
            self._memory.wait(self._copied)
            self._on_device = None

    def __del__(self) -> None:
        # A pass without backward ends here, perhaps with a copy in flight.
        self._leave_device()
        self._memory.free(self._pages)


def page_sizes(nbytes: int) -> list[int]:
    """The pages of a tensor, in bytes: powers of two, of which only the last may not be filled."""
    smallest = PAGE >> (SIZES - 1)
    rest = -(-nbytes // smallest) * smallest
    sizes, size = [], PAGE
    while rest:
        if rest >= size:
            sizes.append(size)
            rest -= size
        else:
            size //= 2
    return sizes


def in_pieces(tokens: Tensor) -> tuple[Tensor, ...]:
    """The bytes of a tensor, a page at a time."""
    ends = accumulate(page_sizes(tokens.nbytes))
    return tokens.view(-1).view(torch.uint8).tensor_split([*ends][:-1])
