"""The peak of live tensor bytes, counted by storage, independent of the allocator."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivePeak(TorchDispatchMode):
    """Counts the bytes of storages that torch operations allocate inside this context.

    A storage counts once, whatever the number of its views, from the operation that returns it
    until its last tensor is freed, also after the context. Tensors that existed before do not
    count. Works on CPU, on CUDA and with fake tensors, in forward and backward. Not counted:
    temporary memory inside an operation, and the allocator's rounding and fragmentation.

    ``live`` and ``peak`` are bytes. Trackers may be nested; each has its own count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        # By address of the storage.
        self._bytes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        if _allocates(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._note(tensor, func, (args, kwargs))

        self.peak = max(self.peak, self.live + self.workspace_of(func, args, result))
        return result

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes of a storage."""
        return storage.nbytes()

    def workspace_of(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes of temporary memory inside an operation, which are not counted here."""
        return 0

    def _note(self, tensor: Tensor, func: Any, inputs: Any) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, self.size_of(storage)
        known = address in self._bytes

        # A tensor that existed before, or a view of it. lift_fresh returns the new tensor of
        # torch.tensor, which is its input.
        is_lifted = func is torch.ops.aten.lift_fresh.default
        if not known and not is_lifted and _shares(storage, inputs):
            return

        # A known storage may have been resized.
        self.live += num_bytes - self._bytes.get(address, 0)
        self._bytes[address] = num_bytes
        if not known:
            weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self.live -= self._bytes.pop(address)


@cache
def _allocates(func: Any) -> bool:
    """True if an operation may return new memory; most operations return views, which do not."""
    if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.resize_.default):
        return True
    returns = func._schema.returns
    aliases = [returned.alias_info for returned in returns]
    return not aliases or not all(alias and not alias.is_write for alias in aliases)


def _shares(storage: torch.UntypedStorage, inputs: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors)
