"""Dtypes of precisions in configs, and host-device copies that do not synchronize."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


T = TypeVar("T")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with each tensor in it, in its lists and in its dataclasses replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list):
        return [map_tensors(function, branch) for branch in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        branches = {field.name: getattr(tree, field.name) for field in fields(tree)}
        mapped = {name: map_tensors(function, branch) for name, branch in branches.items()}
        return replace(tree, **mapped)
    return tree


def to_device(tree: T, device: torch.device) -> T:
    """The tree with its tensors on the device, without blocking the host.

    A copy from pageable memory waits for all work queued on the GPU, so tensors are pinned first
    if they are not. Pinned memory is cached for later copies.
    """
    result: T = map_tensors(partial(_to_device, device=device), tree)
    return result


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copied_ahead(trees: Iterator[T], device: torch.device) -> Iterator[T]:
    """The trees on the device, where the copy of the next one has started before one is yielded.

    Copies run on another stream than the computation. So two trees are on the device,
    and a third one while the consumer asks for the next. On the CPU nothing is copied or read
    ahead.
    """
    if device.type != "cuda":
        yield from trees
        return

    stream = torch.cuda.Stream(device)
    ahead: tuple[T, torch.cuda.Event] | None = None
    for tree in trees:
        with torch.cuda.stream(stream):
            copied = to_device(tree, device), stream.record_event()
        if ahead is not None:
            yield _handed_over(*ahead)
        ahead = copied
    if ahead is not None:
        yield _handed_over(*ahead)


def _handed_over(tree: T, copied: torch.cuda.Event) -> T:
    """The tree, for use on the current stream, which waits for the copy."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)

    def keep(tensor: Tensor) -> Tensor:
        # Its memory is of the copies' stream, which must not reuse it while this one reads it.
        tensor.record_stream(current)
        return tensor

    kept: T = map_tensors(keep, tree)
    return kept


class ToHost:
    """A copy of a tensor to the host, queued when it is created and awaited when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        # With non_blocking, torch copies into pinned memory.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if tensor.is_cuda else None
        if self._done is not None:
            self._done.record()

    def tolist(self) -> Any:
        """The numbers, as ``Tensor.tolist`` returns them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
