"""The peak of live tensor bytes, counted tensor by tensor instead of asked of an allocator."""

from __future__ import annotations

import weakref
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivePeak(TorchDispatchMode):
    """Counts the bytes of the storages that torch operations allocate while it is entered, forward
    and backward.

    A storage counts once, however many views of it exist, from the operation that returns it until
    its last tensor is gone, even if that is after the exit. Tensors that existed before do not
    count. Works on CPU, on CUDA and with fake tensors, which hold no data. Not seen: what an
    operation allocates and frees inside itself, and what an allocator adds by rounding and
    fragmentation.

    ``live`` and ``peak`` are bytes. Trackers may be nested; each counts for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._bytes: dict[int, int] = {}  # by address of the storage
        self._watched: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far; what is live stays counted."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _allocates(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._note(tensor, func, (args, kwargs))
        return result

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that a storage counts for."""
        return storage.nbytes()

    def _note(self, tensor: Tensor, func: Any, inputs: Any) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, self.size_of(storage)
        known = address in self._bytes
        if not known and func is not torch.ops.aten.lift_fresh.default and _shares(storage, inputs):
            return  # a tensor that existed before, or a view of it; lift_fresh hands on what torch.tensor has made
        self.live += num_bytes - self._bytes.get(
            address, 0
        )  # a known storage may have been resized
        self.peak = max(self.peak, self.live)
        self._bytes[address] = num_bytes
        if not known:
            self._watched[address] = weakref.ref(storage, partial(self._freed, address))

    def _freed(self, address: int, _: weakref.ref) -> None:
        self.live -= self._bytes.pop(address)
        del self._watched[address]


@cache
def _allocates(func: Any) -> bool:
    """Whether an operation may return memory that its inputs do not hold: no plain view does, and
    most are these.
    """
    if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.resize_.default):
        return True
    returns = func._schema.returns
    return not (returns and all(one.alias_info and not one.alias_info.is_write for one in returns))


def _shares(storage: torch.UntypedStorage, inputs: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors)
