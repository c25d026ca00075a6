"""Sequence parallelism put on a model from outside, and taken off again.

A model names the points where its tokens enter, change layout and leave (``sharding_points``); ``parallelize`` hangs
the distributed versions there:

* shard: this rank takes its balanced run of spatial rows; only these are embedded;
* switch: one all-to-all between spatial and temporal rows (none where whole samples lie on each rank);
* spatial attention: local, or where there are fewer spatial rows than ranks, split by rows x heads while all tokens
  stay in temporal rows;
* recompute: as before, but what was received inside a block is kept, so that nothing is sent twice;
* gather: the output rows of all ranks are collected, or stay where they are as a ``Shard``.

The gradient rule: the mean over the ranks of each rank's gradient is the gradient of the mean of the ranks' losses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .collectives import gather_rows, keep_exchanged, switch_tokens
from .layout import balanced_run, plan_switch, run_sizes
from .mesh import SequenceMesh

Model = TypeVar("Model", bound=nn.Module)
Rows = Any  # the model's own description of the rows held: grid, layout, per_sample, length, total, turned(), take()
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
    """What hangs on a parallelized model."""

    def __init__(self, model: nn.Module, mesh: SequenceMesh) -> None:
        self.mesh = mesh
        self._output = "full"
        attached: dict[str, Callable[..., Any]] = {"gather": self._gather}
        if mesh.sp_size > 1:
            attached |= dict(shard=self._shard, switch=self._switch, recompute=self._recompute, spatial=self._attend)
        self._points = []
        for name, function in attached.items():
            for point in _find(model, model.sharding_points[name]):  # type: ignore[index]
                point.attach(function)
                self._points.append(point)
        self._handle = model.register_forward_pre_hook(self._take_output_argument, with_kwargs=True)

    def __deepcopy__(self, memo: dict) -> SequenceParallel:
        raise ValueError(
            "got a parallelized model to copy; expected a bare one; copy before parallelize, or unwrap(model) first"
        )

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
        if self._splits_heads(rows):
            rows = rows.turned()
        return rows.take(*self._run(rows))

    def _switch(self, local: Callable, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        num_samples = rows.total // rows.per_sample
        if num_samples % self.mesh.sp_size == 0:
            return local(x, rows)  # every rank holds whole samples
        if self._splits_heads(rows):
            return x, rows
        tokens = self._exchange(x.flatten(0, 1), num_samples, rows.per_sample, rows.length, "switch")
        turned = rows.turned()
        turned = turned.take(*self._run(turned))
        return tokens.unflatten(0, (turned.count, turned.length)), turned

    def _attend(self, local: Callable, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Spatial attention while tokens stay in temporal rows ``[R, T, H, D]``: one unit is a frame's S tokens of one
        head, and units are dealt out as rows are. So this is a switch of D-wide tokens in rows of T * H."""
        if not self._splits_heads(rows):
            return local(q, k, v, rows)
        num_samples, S, units = rows.total // rows.per_sample, rows.per_sample, rows.length * q.shape[2]
        qkv = torch.stack([q, k, v], dim=3).flatten(0, 2).flatten(1)  # [R * T * H, 3 * D]
        qkv = self._exchange(qkv, num_samples, S, units, "heads").view(-1, S, 1, 3, q.shape[3])
        out = local(*qkv.unbind(3), rows)  # [units held, S, 1, D]
        return self._exchange(out.flatten(0, 2), num_samples, units, S, "heads").view(q.shape)

    def _recompute(self, local: Callable, block: nn.Module, rows: Rows, *args: Any) -> Tensor:
        if self._splits_heads(rows):  # then the block communicates
            return local(block, rows, *args, context_fn=keep_exchanged)
        return local(block, rows, *args)

    def _splits_heads(self, rows: Rows) -> bool:
        """Whether whole spatial rows would leave ranks empty, so that spatial attention is split by heads as well."""
        spatial = rows if rows.layout == "spatial" else rows.turned()
        return spatial.total < self.mesh.sp_size

    def _exchange(self, tokens: Tensor, num_samples: int, per_sample: int, length: int, kind: str) -> Tensor:
        """From ``per_sample`` rows of ``length`` tokens a sample to ``length`` rows of ``per_sample`` tokens."""
        mesh = self.mesh
        assert mesh.sp_group is not None
        plan = plan_switch(num_samples, per_sample, length, mesh.sp_size, mesh.sp_rank, tokens.device)
        return switch_tokens(tokens, plan, mesh.sp_group, kind=kind)

    def _gather(self, local: Callable, x: Tensor, rows: Rows) -> Tensor | Shard:
        if self._output == "shards":
            return Shard(x, rows)
        if self.mesh.sp_size > 1:
            assert self.mesh.sp_group is not None
            x = gather_rows(x, run_sizes(rows.total, self.mesh.sp_size), self.mesh.sp_group)
            rows = rows.take(0, rows.total)
        return local(x, rows)

    def _run(self, rows: Rows) -> tuple[int, int]:
        return balanced_run(rows.total, self.mesh.sp_size, self.mesh.sp_rank)


def _find(model: nn.Module, pattern: str) -> list[Any]:
    """Modules whose dotted name fits a pattern, where * stands for one part of it."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [module for name, module in model.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ValueError(
            f"got sharding point {pattern!r}, which fits no module of {type(model).__name__}; expected the name of "
            "one; correct sharding_points"
        )
    return found


def parallelize(model: Model, mesh: SequenceMesh) -> Model:
    """Make a model compute each batch together with the other ranks of ``mesh.sp_group``.

    Works in place and returns the same object: same class, parameters and state dict. Every rank of the group calls
    the model with the same inputs. ``forward`` takes one more keyword: ``output="full"`` (default) returns the bare
    model's output on every rank, ``output="shards"`` a ``Shard`` of it.

    Raises:
        ValueError: if the model does not name its sharding points, or is parallelized already.
    """
    named = getattr(model, "sharding_points", None)
    needed = {"shard", "switch", "gather", "spatial", "recompute"}
    if not isinstance(named, dict) or set(named) != needed:
        raise ValueError(
            f"got a model of class {type(model).__name__} with sharding_points {named!r}; expected a dict that names "
            f"its {sorted(needed)} points; see docs/architecture.md"
        )
    if hasattr(model, _ATTRIBUTE):
        raise ValueError("got a model that is parallelized already; expected a bare one; call unwrap(model) first")
    setattr(model, _ATTRIBUTE, SequenceParallel(model, mesh))
    return model


def unwrap(model: Model) -> Model:
    """Undo ``parallelize``: the same object, bare again. A bare model is returned as it is.

    Raises:
        ValueError: if ``model`` is a wrapper (of DDP or a Booster) around a parallelized model.
    """
    if hasattr(getattr(model, "module", None), _ATTRIBUTE):
        raise ValueError(
            f"got a {type(model).__name__} around a parallelized model; expected that model; call unwrap(model.module)"
        )
    if hasattr(model, _ATTRIBUTE):
        getattr(model, _ATTRIBUTE).remove()
        delattr(model, _ATTRIBUTE)
    return model
