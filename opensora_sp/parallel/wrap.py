"""Sequence parallelism put on a model from outside, and taken off again.

A model names the points where its tokens enter, change layout and leave (``sharding_points``); ``parallelize`` hangs
the distributed versions there:

* shard: this rank takes its balanced run of spatial rows; only these are embedded;
* switch: one all-to-all between spatial and temporal rows (none where whole samples lie on each rank);
* gather: the output rows of all ranks are collected, or stay where they are as a ``Shard``.

The gradient rule: the mean over the ranks of each rank's gradient is the gradient of the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from .collectives import gather_rows, switch_tokens
from .layout import balanced_run, plan_switch, run_sizes
from .mesh import SequenceMesh

Model = TypeVar("Model", bound=nn.Module)
Rows = Any  # the model's own description of the rows held: grid, layout, start, stop, per_sample, length, total, take()
_ATTRIBUTE = "_sequence_parallel"


@dataclass(frozen=True)
class Shard:
    """The part of a model's output that this rank holds.

    ``tensor``: ``[n_rows, T, patch volume * C_out]``, rows (sample, patch) batch-major; ``layout`` knows which rows
    these are: ``layout.slice(z)`` cuts the same patches out of any whole ``[B, C, T, H, W]``, ``[B, T]`` or
    ``[B, T, H, W]`` tensor, and ``layout.inside(device)`` tells latent positions from padding.
    """

    tensor: Tensor
    layout: Rows


class SequenceParallel:
    """What hangs on a parallelized model. ``switches`` counts the all-to-alls it has made, forward only."""

    def __init__(self, model: nn.Module, mesh: SequenceMesh) -> None:
        self.mesh = mesh
        self.switches = 0
        self._output = "full"
        shard, switch, gather = self._points = [model.get_submodule(name) for name in model.sharding_points]  # type: ignore
        gather.attach(self._gather)
        if mesh.sp_size > 1:
            shard.attach(self._shard)
            switch.attach(self._switch)
        self._handle = model.register_forward_pre_hook(self._take_output_argument, with_kwargs=True)

    def remove(self) -> None:
        self._handle.remove()
        for point in self._points:
            point.detach()

    def _take_output_argument(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        self._output = kwargs.pop("output", "full")
        if self._output not in ("full", "shards"):
            raise ValueError(f"got output={self._output!r}; expected 'full' or 'shards'; pass one of these")
        return args, kwargs

    def _shard(self, local: Callable, *args: Any) -> Rows:
        rows = local(*args)
        return rows.take(*self._run(rows))

    def _switch(self, local: Callable, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        num_samples, num_ranks = rows.total // rows.per_sample, self.mesh.sp_size
        if num_samples % num_ranks == 0:
            return local(x, rows)  # every rank holds whole samples
        plan = plan_switch(num_samples, rows.per_sample, rows.length, num_ranks, self.mesh.sp_rank, x.device)
        assert self.mesh.sp_group is not None
        tokens = switch_tokens(x.flatten(0, 1), plan, self.mesh.sp_group)
        self.switches += 1
        turned = rows.turned()
        turned = turned.take(*self._run(turned))
        return tokens.unflatten(0, (turned.count, turned.length)), turned

    def _gather(self, local: Callable, x: Tensor, rows: Rows) -> Tensor | Shard:
        if self._output == "shards":
            return Shard(x, rows)
        if self.mesh.sp_group is not None:
            x = gather_rows(x, run_sizes(rows.total, self.mesh.sp_size), self.mesh.sp_group)
            rows = rows.take(0, rows.total)
        return local(x, rows)

    def _run(self, rows: Rows) -> tuple[int, int]:
        return balanced_run(rows.total, self.mesh.sp_size, self.mesh.sp_rank)


def parallelize(model: Model, mesh: SequenceMesh) -> Model:
    """Make a model compute each batch together with the other ranks of ``mesh.sp_group``.

    Works in place and returns the same object: same class, parameters and state dict. Every rank of the group calls
    the model with the same inputs. ``forward`` takes one more keyword: ``output="full"`` (default) returns the bare
    model's output on every rank, ``output="shards"`` a ``Shard`` of it.

    Raises:
        ValueError: if the model names no sharding points, or is parallelized already.
    """
    if not hasattr(model, "sharding_points"):
        raise ValueError(
            f"got a model of class {type(model).__name__} without sharding_points; expected a model that names where "
            "its tokens enter, change layout and leave; see docs/architecture.md"
        )
    if hasattr(model, _ATTRIBUTE):
        raise ValueError("got a model that is parallelized already; expected a bare one; call unwrap(model) first")
    setattr(model, _ATTRIBUTE, SequenceParallel(model, mesh))
    return model


def unwrap(model: Model) -> Model:
    """Undo ``parallelize``: the same object, bare again. A bare model is returned as it is."""
    if hasattr(model, _ATTRIBUTE):
        getattr(model, _ATTRIBUTE).remove()
        delattr(model, _ATTRIBUTE)
    return model


def sequence_parallel(model: nn.Module) -> SequenceParallel | None:
    """What ``parallelize`` hung on this model, or None."""
    return getattr(model, _ATTRIBUTE, None)
