"""What a pair of blocks costs on CUDA's code path under the stub: kernels launched, bytes moved.

    costs = pair_costs(frames=64, patches=1024)
    costs["forward"].launches

Operators count with what they are given and return. A model of two pairs less a model of one: what
embedders and the final layer do cancels. Nothing is computed, so any size takes the same seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from cuda_cases import cache, launched
from cuda_stub import Recording, phase, run_on_stub
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PHASES = ("forward", "backward")
MATRIX_PRODUCTS = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm"}
ATTENTION = (
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "short_rows",
)
NO_TRAFFIC = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach"}
# Operators that read as much of their first argument as they return, by an index.
GATHERS = {"index_select", "index"}
# Operators that write their first argument without reading it: all of it, or as much as the last.
OVERWRITES = {"copy_", "fill_", "zero_"}
SCATTERS = {"index_copy_"}
# Of these arguments kernels read queries and keys, and leave out the values.
WITHOUT_VALUES = {"qk_norm": 0, "qk_norm_backward": 3}


class OperatorBytes(TorchDispatchMode):
    """Counts the bytes that operators read and write, by phase and kind of operator.

    Kinds are "matrix products", "attention", "switch" (pack and place) and "elementwise", which
    includes norms and reductions. A broadcast dim is read once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.bytes: dict[str, Counter[str]] = {name: Counter() for name in PHASES}

    def begin(self, name: str) -> None:
        """Name the phase of the operators and kernels that follow."""
        self.phase = name
        phase(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        inputs, outputs = tensors_of((args, read)), tensors_of(result)
        if func._schema.is_mutable or not is_view(inputs, outputs):
            self.add(kind_of(name), moved_bytes(name, inputs, outputs))
        if name in WITHOUT_VALUES:
            self.add(kind_of(name), -size_of([args[WITHOUT_VALUES[name]]]) // 3)
        return result

    def add(self, kind: str, moved: int) -> None:
        if self.phase in self.bytes:
            self.bytes[self.phase][kind] += moved

    @contextmanager
    def seeing_inside(self) -> Iterator[None]:
        """Count what operators hide as well: copies that kernels need."""
        contiguous = Tensor.contiguous

        def copy(x: Tensor, *args: Any, **options: Any) -> Tensor:
            # Outside of operators the mode sees the copy itself.
            if not torch._C._len_torch_dispatch_stack() and not x.is_contiguous():
                self.add("elementwise", 2 * size_of([x]))
            return contiguous(x, *args, **options)

        with mock.patch.object(Tensor, "contiguous", copy):
            yield


def moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that one operator reads and writes."""
    if name in NO_TRAFFIC:
        return 0

    written = size_of(outputs)
    if name in GATHERS:
        return 2 * written
    if name in SCATTERS:
        return 2 * size_of(inputs[-1:])
    read = inputs[1:] if name in OVERWRITES else inputs
    return size_of(read) + written


def is_view(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {z.untyped_storage()._cdata for z in inputs}
    return all(z.untyped_storage()._cdata in storages for z in outputs)


def kind_of(name: str) -> str:
    if name in MATRIX_PRODUCTS:
        return "matrix products"
    if name.startswith(ATTENTION):
        return "attention"
    return "switch" if name in GATHERS | SCATTERS else "elementwise"


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes in memory of distinct tensors, expanded dims counted once."""
    sizes = {}
    for z in tensors:
        numel = 1
        for size, stride in zip(z.shape, z.stride(), strict=True):
            numel *= size if stride else 1
        place = z.untyped_storage()._cdata, z.storage_offset(), z.shape, z.stride()
        sizes[place] = numel * z.element_size()
    return sum(sizes.values())


@dataclass(frozen=True)
class Costs:
    """Of one pair of blocks, in one phase.

    Attributes:
        launches: kernels and matrix products.
        activations: traffic by kind of operator, in activations of C bf16 numbers per token.
    """

    launches: int
    activations: Mapping[str, float]


def pair_costs(
    *,
    frames: int,
    patches: int,
    samples: int = 1,
    kernels: str = "torch",
    training: bool = True,
    **options: Any,
) -> dict[str, Costs]:
    """Costs of a pair of blocks of STDiT3-XL/2 in bf16, by phase.

    `kernels`: as in `set_kernels`. Without `training` there are no gradients, and no backward
    pass. Launches include copies and memsets.
    """
    setting = kernels, training
    runs = {
        depth: run_on_stub(
            on_step,
            depth,
            (frames, patches, samples),
            setting,
            options,
            env=cache(),
            timeout=500,
        )
        for depth in (1, 2)
    }
    activation = samples * frames * patches * 1152 * 2
    costs = {}
    for name in PHASES if training else PHASES[:1]:
        launches = [all_launched(runs[depth].in_phase(name)) for depth in (1, 2)]
        one, two = (runs[depth].result[name] for depth in (1, 2))
        kinds = {kind: (two[kind] - one[kind]) / activation for kind in two}
        costs[name] = Costs(launches[1] - launches[0], kinds)
    return costs


def all_launched(recording: Recording) -> int:
    return launched(recording) + len(recording.copies) + len(recording.memsets)


def on_step(
    depth: int,
    size: tuple[int, int, int],
    setting: tuple[str, bool],
    options: dict[str, Any],
) -> dict[str, Counter[str]]:
    """One forward pass, in training a backward pass too; the bytes that its operators move."""
    from opensora_sp.models import build_model
    from opensora_sp.models.kernels import set_kernels

    (frames, patches, samples), (kernels, training) = size, setting
    set_kernels(kernels)
    model = build_model("STDiT3-XL/2", depth=depth, **options).to("cuda", torch.bfloat16)
    # Frames of one line of patches; of 2 x 2 positions each.
    x = torch.zeros(samples, 4, frames, 2, 2 * patches, device="cuda")
    y = torch.zeros(samples, 1, 300, 4096, device="cuda")
    timestep = torch.full((samples,), 500.0, device="cuda")

    counter = OperatorBytes()
    with counter.seeing_inside(), torch.set_grad_enabled(training), counter:
        counter.begin("forward")
        loss = model(x, timestep, y).square().mean()
        counter.begin("backward")
        if training:
            loss.backward()
        counter.begin("end")
    return counter.bytes
