"""Recordings of a run: outputs of all modules in the order of the forward pass, and exchanges."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OUTPUT = "output"
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
EXCHANGES = ("allgather", "all_gather", "alltoall", "all_to_all")


def plain_name(name: str) -> str:
    """The name of a module or parameter without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a nested output."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def whole(tensor: Any) -> Any:
    """A tensor of its own memory on the CPU; of a DTensor all of it, for which all ranks call."""
    if tensor is None:
        return None
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().to("cpu", copy=True)


class Recorder:
    """Outputs of a model's modules in one forward pass, in the order in which modules return.

    Attributes:
        outputs: tensors by module; a module's second call is "name (call 2)".
        entered: modules in whose forward pass the model is, outermost first.
    """

    def __init__(self, on_enter: Callable[[str], object] = lambda name: None) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.entered: list[str] = []
        self._on_enter = on_enter
        self._calls: Counter[str] = Counter()

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record while the context lasts."""
        handles = []
        for name, module in model.named_modules():
            shown = plain_name(name) or OUTPUT
            # Not the model inside of its wrapper.
            if not name or shown != OUTPUT:
                handles.append(module.register_forward_pre_hook(partial(self._enter, shown)))
                handles.append(module.register_forward_hook(partial(self._return, shown)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if _is_forward():
            self.entered.append(name)
            self._on_enter(name)

    def _return(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_forward():
            self.entered.pop()
            self._calls[name] += 1
            call = self._calls[name]
            key = name if call == 1 else f"{name} (call {call})"
            if tensors := tensors_of(output):
                self.outputs[key] = [whole(tensor) for tensor in tensors]


def _is_forward() -> bool:
    """False while a backward pass computes a checkpointed forward pass again."""
    return bool(torch._C._current_graph_task_id() == -1)


class Exchange(NamedTuple):
    """Data that a rank has given to an all-gather or all-to-all in a module."""

    operation: str
    module: str | None
    num_bytes: int
    digest: str


class ExchangeRecorder(TorchDispatchMode):
    """Record what a rank sends, but sizes and indices, and masks and zeros, equal by chance."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "c10d" in name and any(word in name for word in EXCHANGES):
            for argument, tree in zip(func._schema.arguments, args):
                tensors = [x for x in tensors_of(tree) if x.is_floating_point() and x.numel()]
                if argument.name.startswith(("input", "self")) and tensors:
                    sent = torch.cat([tensor.detach().flatten() for tensor in tensors])
                    if sent.ne(sent[0]).any():
                        module = self._recorder.entered[-1] if self._recorder.entered else None
                        exchange = Exchange(name, module, sent.nbytes, digest(sent))
                        self.exchanges.append(exchange)
        return func(*args, **(kwargs or {}))


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's shape, dtype and bytes."""
    content = whole(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.shape}{tensor.dtype}".encode() + content).hexdigest()
