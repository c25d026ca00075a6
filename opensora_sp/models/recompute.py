"""Gradient checkpointing: which activations of a block forward keeps, and backward recomputes.

Activation checkpointing (Chen et al., 2016) keeps the input of a block alone. Selective activation
recomputation (Korthikanti et al., 2022) also keeps results that take long to compute for their
size. A *level* is the number of ``STAGES`` that are kept, in the order of the time that each byte
saves. At level 0 all is recomputed, at ``EVERYTHING`` nothing is. Norms, modulation, rotary
positions and GELU are recomputed below ``EVERYTHING``: their results are large and quick.

With an MLP of four times the width, a block keeps 0, 1, 2, 3, 4, 7, 10 or 14 activations of a token
at the levels -1 to 6.

At ``OFFLOADED`` the inputs of blocks wait in pinned host memory from forward until backward, as
vDNN (Rhu et al., 2016) does with activations. Copies run on a separate stream during the
computation::

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
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from opensora_sp.common.graphs import Once, Pair, together

STAGES = (
    "MLP output",
    "self-attention",
    "cross-attention",
    "q, k and v",
    "projections",
    "MLP hidden layer",
)
EVERYTHING = len(STAGES) + 1
"""The level at which nothing is recomputed."""
OFFLOADED = -1
"""The level at which the input, too, is kept on the host."""

PRODUCTS = ("aten::mm", "aten::addmm")
ATTENTIONS = ("scaled_dot_product", "attention_forward", "flash_attn", "short_rows")


def levels_of(setting: bool | int | str | Sequence[int], num_blocks: int) -> list[int]:
    """The level of each block: True recomputes all blocks, a number the first ones; "offload"
    recomputes all and keeps their inputs on the host.

    Raises:
        ValueError: if the model has fewer blocks, or there is no such level or name.
    """
    levels: list[Any] = []
    if setting == "offload":
        levels = [OFFLOADED] * num_blocks
    elif isinstance(setting, int):
        recomputed = num_blocks if setting is True else setting
        levels = [0] * recomputed + [EVERYTHING] * (num_blocks - recomputed)
    elif not isinstance(setting, str):
        levels = list(setting)

    known = range(OFFLOADED, EVERYTHING + 1)
    if len(levels) != num_blocks or not all(level in known for level in levels):
        raise ValueError(
            f"got grad_checkpoint={setting!r}; expected True, False, 'offload', a number from 0 to "
            f"{num_blocks}, the blocks of the model, or a level from {OFFLOADED} to {EVERYTHING} "
            "for each of them; choose one of these (a config may also say 'auto', for which a run "
            "chooses levels)"
        )
    return levels


@dataclass(frozen=True)
class Recompute:
    """How a block runs under gradient checkpointing.

    Args:
        level: below ``EVERYTHING``.
        width, hidden: of the tokens and of the MLP's hidden layer, by which matrix products are
            recognised.
        preserve_rng: draw the same random numbers again, for dropout.
    """

    level: int
    width: int
    hidden: int
    preserve_rng: bool = False

    def run(
        self, function: Callable[..., Any], *args: Any, context_fn: Callable[[], Pair] | None = None
    ) -> Any:
        """``function(*args)``, of which backward recomputes what this level does not keep.

        ``context_fn`` as of ``torch.utils.checkpoint.checkpoint``, in addition.
        """
        makers = [] if context_fn is None else [context_fn]
        if self.level > 0:
            makers.append(self._contexts)
        options: dict[str, Any] = {"context_fn": partial(together, makers)} if makers else {}
        # Reentrant checkpointing takes no context functions. Models draw nothing, so the
        # generator's state is kept for dropout alone.
        options |= {"use_reentrant": False, "preserve_rng_state": self.preserve_rng}

        tokens: Tensor = args[0]
        with input_on_host(tokens) if self.level == OFFLOADED else nullcontext():
            return checkpoint(function, *args, **options)

    def _contexts(self) -> Pair:
        keeping, using = create_selective_checkpoint_contexts(self._policy)
        # A second backward pass would find the kept results used up, and is refused.
        return keeping, Once(using)

    def _policy(self, context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keeps = stage_of(operator, args, self.width, self.hidden) in STAGES[: self.level]
        # Preferred rather than demanded, so that a compiler may keep more.
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def stage_of(operator: Any, args: Sequence[Any], width: int, hidden: int) -> str | None:
    """The stage that an operator of a block computes, by its name and the shapes it is given."""
    name = operator.name()
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if name.partition(".")[0] in PRODUCTS:
        # A Linear of tokens: the last factor is its weight, transposed.
        by_weight: dict[tuple[int, ...], str] = {
            (hidden, width): "MLP output",
            (width, 3 * width): "q, k and v",
            (width, width): "projections",
            (width, hidden): "MLP hidden layer",
        }
        return by_weight.get(tuple(tensors[-1].shape))

    if any(part in name for part in ATTENTIONS):
        return "self-attention" if tensors[0].shape == tensors[1].shape else "cross-attention"
    return None


# --- inputs on the host

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
    """Buffers of pinned memory for the tensors of a device, and the stream that copies them.

    A buffer is reused in the order of that stream, so nothing has to wait before it is free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.newest: Callable[[], HostedInput | None] = lambda: None
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, nbytes: int) -> Tensor:
        """A buffer for so many bytes."""
        size = buffer_size(nbytes)
        # Pinning new memory takes long, and may wait for the device.
        if self._free[size]:
            return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def free(self, buffer: Tensor) -> None:
        self._free[len(buffer)].append(buffer)

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """Copy as many bytes as the smaller one has, after all that is queued."""
        # Buffers are rounded up to a power of two.
        size = min(len(target), len(source))
        if not size:
            return None
        if self._stream is None:
            target[:size].copy_(source[:size])
            return None
        # The computation may still write the source.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target[:size].copy_(source[:size], non_blocking=True)
        return self._stream.record_event()

    def wait(self, copied: Copied) -> None:
        """Let the current stream wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


@cache
def host_memory(device: torch.device) -> HostMemory:
    """The host memory of a device, for all models of this process."""
    return HostMemory(device)


class HostedInput:
    """The input of one block: on the host and, while it is copied or soon needed, on the device."""

    _on_device: Tensor | None = None

    def __init__(self, tokens: Tensor, memory: HostMemory) -> None:
        self._memory = memory
        # Weakly: a pass without backward frees its inputs though the next one follows them.
        self._before, memory.newest = memory.newest, weakref.ref(self)
        before = self._before()
        if before is not None:
            before._check_unchanged()
            before._leave_device()

        self._shape, self._dtype = tokens.shape, tokens.dtype
        # Tensors of plans have no data.
        self._buffer = memory.take(0 if tokens.is_meta else tokens.nbytes)
        self._on_device = tokens.contiguous()
        self._version = self._on_device._version
        self._copied = memory.copy(self._buffer, as_bytes(self._on_device))

    def take(self) -> Tensor:
        """The tokens on the device, and start to copy the tokens of the block before."""
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
            self._copied = self._memory.copy(as_bytes(self._on_device), self._buffer)
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
        if hasattr(self, "_buffer"):
            self._memory.free(self._buffer)


def as_bytes(tokens: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tokens.view(-1).view(torch.uint8)


def buffer_size(nbytes: int) -> int:
    """Bytes that are pinned for a tensor: a power of two, to which torch rounds them anyway."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
