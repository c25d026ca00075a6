"""One step with and without the other ranks, compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

logger = logging.getLogger(__name__)
ATTRIBUTE = "_sequence_parallel"  # of a parallelized model: what hangs on it
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
NOISE_FLOOR = 1e-3  # of the largest gradient: smaller ones (of a key bias, zero but for rounding) count as this large


@dataclass(frozen=True)
class Verdict:
    """Largest relative differences, ``max|ours - one process| / max|one process|``, the largest over the group.

    ``gradients`` maps parameter names to theirs; ``all_zero`` names parameters whose gradient is zero, of which a step
    shows nothing.
    """

    output: float
    gradients: dict[str, float]
    all_zero: tuple[str, ...]
    tolerance: float

    @property
    def worst(self) -> tuple[str, float]:
        found = {"the output": self.output, **self.gradients}
        name = max(found, key=lambda n: found[n] if found[n] == found[n] else float("inf"))
        return name, found[name]

    @property
    def agrees(self) -> bool:
        return self.worst[1] <= self.tolerance  # false for NaN

    def __str__(self) -> str:
        name, difference = self.worst
        return (
            f"with and without sequence parallelism the output differs by {self.output:.1e}, {len(self.gradients)} "
            f"gradients by at most {difference:.1e} ({name}), relative; {len(self.all_zero)} gradients are zero in both"
        )


def verify_step(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Verdict:
    """Run one forward and backward pass of a parallelized model on a whole batch, bare and parallel. Collective.

    Parameters keep their gradients, buffers and random generators their values. The model returns one tensor.
    """
    hooks = getattr(model, ATTRIBUTE)
    mesh = hooks.mesh
    kwargs = {name: value for name, value in (kwargs or {}).items() if name != "output"}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(), torch.inference_mode(False):
        with _suspended(hooks):
            wanted, wanted_gradients = _step(model, args, kwargs)
        output, gradients = _step(model, args, kwargs)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    for name, gradient in gradients.items():
        whole = gradient.clone(
            memory_format=torch.contiguous_format
        )  # autograd expands or shares what it can
        dist.all_reduce(whole, group=mesh.sp_group)
        gradients[name] = whole / mesh.sp_size
    largest = max((g.abs().max().item() for g in wanted_gradients.values()), default=0.0)
    found = [_difference(output, wanted, 0.0)]
    found += [
        _difference(gradients[name], g, largest * NOISE_FLOOR)
        for name, g in wanted_gradients.items()
    ]
    over_ranks = torch.tensor(found, dtype=torch.float64).nan_to_num(
        nan=float("inf")
    )  # a maximum may lose a NaN
    dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=mesh.host_group)
    first, *rest = over_ranks.tolist()
    zero = [
        name for name, g in wanted_gradients.items() if not g.any() and not gradients[name].any()
    ]
    dtypes = {output.dtype, *(p.dtype for p in model.parameters() if p.requires_grad)}
    tolerance = max(TOLERANCE.get(dtype, 1e-3) for dtype in dtypes) if hooks.exact else 0.2
    return Verdict(first, dict(zip(wanted_gradients, rest, strict=True)), tuple(zero), tolerance)


def verify_first_step(model: nn.Module) -> None:
    """Verify the first batch that the model is called with, log what was found, and refuse to go on if it is wrong."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        verdict = verify_step(module, args, kwargs)
        if not verdict.agrees:
            raise ValueError(
                f"got another result under sequence parallelism: {verdict}; expected at most {verdict.tolerance:.0e}; "
                "give all ranks the same weights and inputs, turn dropout off while you verify, and correct the "
                "model's ShardPlan or sharding_points"
            )
        logger.info("%s", verdict)

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    getattr(model, ATTRIBUTE).handles.append(handle)  # unwrap takes it off, too


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole output, and the gradients of a weighted sum of it, without touching ``p.grad``."""
    with torch.enable_grad():
        args, kwargs = tree_map(_own, (args, kwargs))
        output = model(*args, **kwargs)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found: tuple[Tensor | None, ...] = ()
        if named:
            found = torch.autograd.grad(
                (output * weights).sum(), list(named.values()), allow_unused=True
            )
    gradients = {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found)
    }
    return output.detach(), gradients


def _own(value: Any) -> Any:
    """A copy of a tensor, or of what a dataclass (encoded text) holds of them, without the graph behind it: two steps
    would go back through that. Inference tensors, which autograd cannot keep, become normal ones."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: tree_map(_own, getattr(value, one.name)) for one in fields(value)}
        )
    return value


def _difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if not theirs.numel():
        return 0.0
    scale = max(theirs.abs().max().item(), floor)
    difference = (ours - theirs).abs().max().item()
    return difference / scale if scale else difference


@contextmanager
def _suspended(hooks: Any) -> Iterator[None]:
    """The bare model for a while. (Torch's hooks cannot be taken off while they run.)"""
    hooks.suspended = True
    try:
        yield
    finally:
        hooks.suspended = False
