"""Recordings of a run: its precision, outputs of modules in the order of the forward pass, and what
ranks exchange.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OUTPUT = "output"
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
EXCHANGES = ("allgather", "all_gather", "alltoall", "all_to_all")
LOWER = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class Lifted(TorchFunctionMode):
    """Casts to float32 and below lifted to float64, so that models which cast are compared exactly:
    every lower dtype in a call of torch is float64, and ``.float()`` is ``.double()``.

    Attributes:
        lowest: precision that calls have returned.
    """

    def __init__(self, is_lifting: bool = True) -> None:
        super().__init__()
        self.is_lifting, self.lowest = is_lifting, torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward and not kwargs["inputs"]:
            gradient, create_graph = kwargs["gradient"], kwargs["create_graph"]
            gradient = torch.ones_like(args[0]) if gradient is None else gradient
            keeps = bool(kwargs["retain_graph"]) or create_graph
            flags = {"allow_unreachable": True, "accumulate_grad": True}
            # The engine itself: a call of torch would leave this mode, and recompute without it.
            with self:
                return _engine_run_backward(args, (gradient,), keeps, create_graph, (), **flags)
        if self.is_lifting:
            func = torch.Tensor.double if func in CASTS else func
            args = [_lifted(argument) for argument in args]
            kwargs = {name: _lifted(argument) for name, argument in kwargs.items()}

        result = func(*args, **kwargs)
        if is_floating(result):
            self.lowest = max(self.lowest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


def _lifted(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in LOWER else argument


class Exchange(NamedTuple):
    """Numbers that a rank has given to an all-gather or all-to-all in a module."""

    operation: str
    module: str | None
    num_bytes: int
    digest: str


class Recorder(TorchDispatchMode):
    """Outputs of a model's modules in one forward pass, in the order in which modules return, and
    what a rank sends in it, but sizes and indices, and masks and zeros, which are equal by chance.

    Attributes:
        outputs: by module and position; a module's second call is "name (call 2)".
        entered: modules in whose forward pass the model is, outermost first.
    """

    def __init__(self, on_enter: Callable[[str], object]) -> None:
        super().__init__()
        self.outputs: dict[tuple[str, int], Tensor] = {}
        self.exchanges: list[Exchange] = []
        self.entered: list[str] = []
        self._on_enter = on_enter
        self._calls: Counter[str] = Counter()

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record while the context lasts."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                shown = plain_name(name) or OUTPUT
                # Not the model inside of its wrapper.
                if not name or shown != OUTPUT:
                    enter, leave = partial(self._enter, shown), partial(self._return, shown)
                    stack.enter_context(module.register_forward_pre_hook(enter))
                    stack.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if _is_forward():
            self.entered.append(name)
            self._on_enter(name)

    def _return(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_forward():
            self.entered.pop()
            self._calls[name] += 1
            call = self._calls[name]
            shown = name if call == 1 else f"{name} (call {call})"
            for position, tensor in enumerate(tensors_of(output)):
                self.outputs[shown, position] = whole(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_exchange = "c10d" in name and any(word in name for word in EXCHANGES)
        if is_exchange and _is_forward():
            for argument, tree in zip(func._schema.arguments, args):
                if argument.name.startswith(("input", "self")):
                    self._record(name, filter(is_floating, tensors_of(tree)))
        return func(*args, **(kwargs or {}))

    def _record(self, operation: str, tensors: Iterator[Tensor]) -> None:
        parts = [tensor.detach().flatten() for tensor in tensors]
        sent = torch.cat(parts) if parts else torch.empty(0)
        if sent.ne(sent[:1]).any():
            module = self.entered[-1] if self.entered else None
            self.exchanges.append(Exchange(operation, module, sent.nbytes, digest(sent)))


def _is_forward() -> bool:
    """False while a backward pass computes a checkpointed forward pass again."""
    return bool(torch._C._current_graph_task_id() == -1)


def plain_name(name: str) -> str:
    """The name of a module or parameter without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_floating(leaf: Any) -> bool:
    """True for a tensor of floating-point numbers."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a nested output."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def whole(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a DTensor the whole tensor, for which all ranks call."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().to("cpu", copy=True)


def gradients_of(leaves: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The whole gradients of named tensors; zeros where there is none."""
    return {
        plain_name(name): whole(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        for name, leaf in leaves
        if leaf.requires_grad
    }


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's shape, dtype and bytes."""
    content = whole(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.shape}{tensor.dtype}".encode() + content).hexdigest()
