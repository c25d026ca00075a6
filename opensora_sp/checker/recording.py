"""Recordings of a run: outputs of all modules in the order of the forward pass, and exchanges."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def whole(tensor: Tensor) -> Tensor:
    """A tensor of its own memory on the CPU; of a DTensor all of it, for which all ranks call."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True)


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
    def attached(self, model: nn.Module) -> Iterator[Recorder]:
        """Record while the context lasts."""
        handles = []
        for name, module in model.named_modules():
            shown = plain_name(name) or OUTPUT
            if name and shown == OUTPUT:
                # A model inside of its wrapper.
                continue
            handles += [
                module.register_forward_pre_hook(self._entering(shown)),
                module.register_forward_hook(self._returning(shown)),
            ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if _is_forward():
                self.entered.append(name)
                self._on_enter(name)

        return hook

    def _returning(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not _is_forward():
                return
            self.entered.pop()
            self._calls[name] += 1
            call = self._calls[name]
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors:
                key = name if call == 1 else f"{name} (call {call})"
                self.outputs[key] = [whole(tensor) for tensor in tensors]

        return hook


def _is_forward() -> bool:
    """False while a backward pass computes a checkpointed forward pass again."""
    return bool(torch._C._current_graph_task_id() == -1)


class Exchange(NamedTuple):
    """Data that a rank has given to an all-gather or all-to-all."""

    operation: str
    module: str | None
    num_bytes: int
    digest: str
    is_constant: bool


class ExchangeRecorder(TorchDispatchMode):
    """Record what a rank sends; only floating-point tensors, as others are sizes and indices."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if "c10d" in name and any(word in name for word in EXCHANGES):
            for argument, tensors in zip(func._schema.arguments, args):
                if argument.name.startswith(("input", "self")):
                    self._record(name, tree_leaves(tensors))
        return func(*args, **(kwargs or {}))

    def _record(self, operation: str, tensors: list[Any]) -> None:
        floating = [
            leaf for leaf in tensors if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        sent = [tensor.detach().cpu().contiguous().flatten() for tensor in floating]
        if sum(tensor.numel() for tensor in sent):
            entries = torch.cat([tensor.double() for tensor in sent])
            self.exchanges.append(
                Exchange(
                    operation,
                    self._recorder.entered[-1] if self._recorder.entered else None,
                    sum(tensor.numel() * tensor.element_size() for tensor in sent),
                    digest(entries),
                    bool((entries == entries[0]).all()),
                )
            )


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's shape, dtype and bytes."""
    content = whole(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.shape}{tensor.dtype}".encode() + content).hexdigest()
