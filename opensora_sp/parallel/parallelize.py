"""Sequence parallelism put on a model from outside, and taken off again.

A model names the points where its tokens enter, change layout, attend and leave (``sharding_points``); ``parallelize``
hangs a mode of sharing the batch there (``modes.py``), chosen for each shape. At the last point, ``gather``, the output
rows of all ranks are collected, or stay where they are as a ``Shard``. Models that name no points take part by a
``ShardPlan`` (``plan.py``).

The gradient rule: the mean over the ranks of each rank's gradient is the gradient of the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from .collectives import gather_rows
from .debug.input_check import SameBatch
from .debug.parity import ATTRIBUTE, verify_first_step
from .mesh import SequenceMesh
from .options import Options
from .shard_plan import COPIED, find, registered_plan
from .strategies import Local, WholeSamples, choose_mode
from .token_layout import Grid, Rows
from .typed import Arguments

Model = TypeVar("Model", bound=nn.Module)
POINTS = ("shard", "switch", "segment", "gather", "spatial", "temporal", "rowwise")


@dataclass(frozen=True)
class Shard:
    """The part of a model's output that this rank holds.

    ``tensor``: ``[n_rows, T, patch volume * C_out]``, rows (sample, patch) batch-major (or, if that is how the batch is
    shared, ``[n_rows, S, ...]``, rows (sample, frame)); ``layout`` knows which rows
    these are: ``layout.slice(z)`` cuts the same patches out of any whole ``[B, C, T, H, W]``, ``[B, T]`` or
    ``[B, T, H, W]`` tensor, and ``layout.inside(device)`` tells latent positions from padding.
    """

    tensor: Tensor
    layout: Rows

    def combine(self, function: Callable[..., Tensor], *others: Shard) -> Shard:
        """``function(tensor, *tensors of the others)`` as a shard of the same layout.

        Raises:
            ValueError: if the shards hold different rows.
        """
        for other in others:
            if other.layout != self.layout:
                raise ValueError(
                    f"got shards of different layouts, {_described(self.layout)} and {_described(other.layout)}; "
                    "expected the same rows of the same batch; combine outputs of batches of one shape"
                )
        return Shard(function(self.tensor, *(other.tensor for other in others)), self.layout)


class SequenceParallel:
    """What hangs on a parallelized model that names its points."""

    def __init__(self, model: nn.Module, mesh: SequenceMesh, options: Options) -> None:
        self.model, self.mesh, self.options = model, mesh, options
        self.exact = options.comm_dtype is None
        self.suspended = False  # while True, points do their local thing
        self._output = "full"
        self._modes: dict[tuple[int, ...], WholeSamples] = {}
        self.handles: list[Any] = []
        self._points: list[Any] = []
        self._attach_all()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(COPIED)

    def _attach_all(self) -> None:
        named = self.model.sharding_points
        wanted: list[tuple[str, Callable[..., Any]]] = [(named["gather"], self._gather)]
        if self.mesh.sp_size > 1:
            wanted.append((named["shard"], self._shard))
            for name in ("switch", "segment", "spatial", "temporal", "rowwise"):
                wanted.append((named[name], partial(self._in_mode, name)))
            for name in ("spatial", "temporal"):
                wanted.append((f"{named[name]}.attend", partial(self._in_mode, f"attend_{name}")))
        found = [
            (point, function) for pattern, function in wanted for point in find(self.model, pattern)
        ]
        for point, function in found:  # all are there
            point.attach(function)
            self._points.append(point)
        if self.mesh.sp_size > 1:
            self.handles.append(
                self.model.register_forward_pre_hook(
                    SameBatch(self.mesh, self.options), with_kwargs=True
                )
            )
        self.handles.append(
            self.model.register_forward_pre_hook(self._take_output_argument, with_kwargs=True)
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for point in self._points:
            point.detach()

    def _take_output_argument(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        self._output = kwargs.pop("output", "full")
        if self._output not in ("full", "shards"):
            raise ValueError(
                f"got output={self._output!r}; expected 'full' or 'shards'; pass one of these"
            )
        return args, kwargs

    def ends(self, grid: Grid) -> list[list[Rows]]:
        """For each rank of the group the rows that it holds where tokens enter and where they leave."""
        mode = self._mode(grid)
        ends = mode.ends(grid.rows("spatial"))
        return [
            [rows.take(*mode.runs(rows)[rank]) for rows in ends]
            for rank in range(self.mesh.sp_size)
        ]

    def _shard(self, local: Local[Rows], grid: Grid) -> Rows:
        return local(grid) if self.suspended else self._mode(grid).shard(local, grid)

    def _in_mode(self, name: str, local: Local[Any], *args: Any, **options: Any) -> Any:
        """What the mode of this batch does at a point; every point is told the rows that are held."""
        if self.suspended:
            return local(*args, **options)
        rows = next(arg for arg in args if hasattr(arg, "grid"))
        if isinstance(args[0], Tensor) and args[0].shape[:2] != (rows.count, rows.length):
            raise ValueError(
                f"got tokens {tuple(args[0].shape)} as {_described(rows)}; expected [{rows.count}, {rows.length}, ..]; "
                "pass each point the rows that its tokens lie in"
            )
        return getattr(self._mode(rows.grid), name)(local, *args, **options)

    def _mode(self, grid: Any) -> WholeSamples:
        key = (grid.num_samples, *grid.shape, grid.full)
        if key not in self._modes:
            config, ranks = self.model.config, self.mesh.sp_size
            mode = choose_mode(self.options, grid, config.hidden_size, config.num_heads, ranks)
            self._modes[key] = mode(self.mesh, self.options, config.num_heads)
        return self._modes[key]

    def _gather(self, local: Local[Tensor], x: Tensor, rows: Rows) -> Tensor | Shard:
        output, self._output = (
            self._output,
            "full",
        )  # model.forward(..) passes by the hook that sets it
        if output == "shards":
            return Shard(x, rows)
        if self.mesh.sp_size > 1 and not self.suspended:
            assert self.mesh.sp_group is not None
            sizes = [stop - start for start, stop in self._mode(rows.grid).runs(rows)]
            x = gather_rows(x, sizes, self.mesh.sp_group)
            rows = rows.take(0, rows.total)
        return local(x, rows)


def _described(rows: Rows) -> str:
    return f"{rows.layout} rows [{rows.start}, {rows.stop}) of {rows.total}"


def parallelize(
    model: Model,
    mesh: SequenceMesh,
    *,
    strategy: str = "switch",
    placement: str = "stream",
    comm_dtype: str | None = None,
    overlap_chunks: int = 1,
    overlap_backward: bool = False,
    recompute_communication: bool = False,
    verify: bool = False,
) -> Model:
    """Make a model compute each batch together with the other ranks of ``mesh.sp_group``.

    Works in place and returns the same object: same class, parameters and state dict. Every rank of the group calls
    the same model with the same inputs. Models, options, modes, and shapes and dtypes of inputs that differ are
    refused on all of them, by one error that names what differs; values are not compared. For models that name their
    ``sharding_points``, ``forward`` takes one more keyword: ``output="full"`` (default) returns the bare model's
    output on every rank, ``output="shards"`` a ``Shard`` of it.

    Args:
        strategy: "switch" turns tokens between spatial and temporal rows; "ulysses" and "split_gather" are exact
            baselines to compare with, which send more.
        placement: "stream" switches the residual stream between blocks; "branch" keeps it in temporal rows and
            switches the input and output of each spatial attention.
        comm_dtype: None sends the model's dtype; with placement "branch" "bf16", or "fp8" (e4m3 forward, e5m2
            backward, a scale for each token).
        overlap_chunks: switch the end of a block in so many chunks, each while the next is computed.
        overlap_backward: under gradient checkpointing, recompute a block while its gradient travels.
        recompute_communication: under gradient checkpointing, receive what blocks exchange once more in recompute
            instead of keeping it.
        verify: run the first batch with and without the other ranks, log the largest relative differences of output
            and gradients, and raise ValueError if they are not those of rounding.

    Raises:
        ValueError: if the model neither names its sharding points nor has a registered ``ShardPlan``, is parallelized
            already, or options do not fit each other.
    """
    options = Options(
        strategy=strategy,
        placement=placement,
        comm_dtype=comm_dtype,
        overlap_chunks=overlap_chunks,
        overlap_backward=overlap_backward,
        recompute_communication=recompute_communication,
    )
    if hasattr(model, ATTRIBUTE):
        raise ValueError(
            "got a model that is parallelized already; expected a bare one; call unwrap(model) first"
        )
    setattr(model, ATTRIBUTE, _hooks(model, mesh, options))
    if verify and mesh.sp_size > 1:
        verify_first_step(model)
    return model


def _hooks(model: nn.Module, mesh: SequenceMesh, options: Options) -> Any:
    plan = registered_plan(model)
    if plan is not None:
        return plan.hooks(model, mesh, options)
    named = getattr(model, "sharding_points", None)
    if not isinstance(named, dict) or set(named) != set(POINTS):
        raise ValueError(
            f"got a model of class {type(model).__name__} with sharding_points {named!r}; expected a dict that names "
            f"its {sorted(POINTS)} points, or a plan; call register_plan({type(model).__name__}, ShardPlan(...)), see "
            "docs/custom_model.md"
        )
    return SequenceParallel(model, mesh, options)


def held_rows(model: nn.Module, grid: Grid) -> list[list[Rows]]:
    """What a parallelized model that names its points reads of a batch, and what its ``Shard`` is of: for each rank of
    the group its rows where tokens enter and where they leave, of the patches ``grid`` (``model.config.grid``). With
    ``output="shards"`` a rank looks at these rows of x alone.
    """
    held: SequenceParallel = getattr(model, ATTRIBUTE)
    return held.ends(grid)


def unwrap(model: Model) -> Model:
    """Undo ``parallelize``: the same object, bare again. A bare model is returned as it is.

    Raises:
        ValueError: if ``model`` is a wrapper (of DDP, a Booster or peft) around a parallelized model.
    """
    within = next(
        (name for name, module in model.named_modules() if ATTRIBUTE in vars(module)), None
    )
    if within:
        raise ValueError(
            f"got a {type(model).__name__} around a parallelized model; expected that model; call "
            f"unwrap(model.{within})"
        )
    if within is not None:
        getattr(model, ATTRIBUTE).remove()
        delattr(model, ATTRIBUTE)
    return model
