"""Sequence parallelism: attached to a model from outside, and detached again.

A ``ShardPlan`` names the hook points where tokens enter, change layout, attend and leave.
``parallelize`` attaches a parallel strategy there, chosen for each shape. At the last point the
output rows of all ranks are gathered, or stay where they are as a ``Shard``.

The gradient rule: the mean over the ranks of each rank's gradient is the gradient of the mean of
the ranks' losses. On a mesh of nested groups it holds for the sum of the losses of all groups
(docs/concepts/gradients.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from .batch_shape import BatchShape, alternates
from .collectives import gather_rows
from .debug.input_check import InputCheck
from .debug.parity import ATTRIBUTE, verify_first_step
from .mesh import SequenceMesh
from .module_points import ModulePoints
from .options import Options, takes_options
from .protocols import Grid, LatentRows, Rows
from .shard_plan import ShardPlan, find_modules, plan_of
from .strategies import SplitAttention, Strategy, SwitchRows, strategy_for, with_chunks
from .typed import Args, Kwargs, Local

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Shard:
    """The part of a model's output that this rank holds.

    ``tensor`` is ``[R, T, patch volume * C_out]`` with rows (sample, patch), or ``[R, S, ...]``
    with rows (sample, frame), both batch-major. ``layout`` describes these rows:
    ``layout.slice(z)`` cuts the same patches out of any whole ``[B, C, T, H, W]``, ``[B, T]`` or
    ``[B, T, H, W]`` tensor, and ``layout.inside(device)`` distinguishes latent positions from
    padding.
    """

    tensor: Tensor
    layout: LatentRows

    def combine(self, function: Callable[..., Tensor], *others: Shard) -> Shard:
        """``function(tensor, *tensors of the others)`` as a shard of the same layout.

        Raises:
            ValueError: if the shards hold different rows.
        """
        for other in others:
            if other.layout != self.layout:
                raise ValueError(
                    f"got shards of different layouts, {_described(self.layout)} and "
                    f"{_described(other.layout)}; expected the same rows of the same batch; "
                    "combine outputs of batches of one shape"
                )
        return Shard(function(self.tensor, *(other.tensor for other in others)), self.layout)


class SequenceParallel:
    """The engine: what ``parallelize`` attaches to the hook points and the forward of a model."""

    def __init__(
        self, model: nn.Module, mesh: SequenceMesh, plan: ShardPlan, options: Options
    ) -> None:
        self.model, self.mesh, self.plan = model, mesh, plan
        self.alternates = alternates(getattr(model, "config", None))
        self.options = plan.supported(options)
        self.handles: list[Any] = []
        self._output = "full"
        self._strategies: dict[tuple[int, ...], Strategy] = {}

        # All modules are found before anything is attached: a wrong plan leaves the model as it
        # was.
        self._attachments: list[tuple[Any, Local]] = []
        if plan.names_hook_points:
            self._attachments = self._hook_points()
        elif mesh.shares_batches:
            self._attachments = ModulePoints(self).attachments()
        self._attach()

        if mesh.shares_batches:
            self._before_forward(InputCheck(mesh, options, plan))
        if plan.names_hook_points:
            self._before_forward(self._take_output_argument)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "got a parallelized model to copy or pickle; expected a bare one; copy before "
            "parallelize, or unwrap(model) first"
        )

    def remove(self) -> None:
        """Leave the model as it was before ``parallelize``."""
        for handle in self.handles:
            handle.remove()
        self._detach()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The bare model for a while. (Torch's own hooks cannot be removed while they run.)"""
        self._detach()
        try:
            yield
        finally:
            self._attach()

    def boundary_rows(self, grid: Grid) -> list[list[LatentRows]]:
        """For each rank of the group its rows where tokens enter and where they leave."""
        strategy = self.strategy(grid)
        boundaries = strategy.boundary_rows(grid.rows("spatial"))
        if not self.alternates:
            boundaries = boundaries[:1]  # tokens leave as they enter

        def held_by(rank: int) -> list[Any]:
            return [rows.take(*strategy.row_ranges(rows)[rank]) for rows in boundaries]

        return [held_by(rank) for rank in range(self.mesh.sp_size)]

    def shard(self, local: Local, grid: Any) -> Any:
        """The rows that this rank holds where tokens enter."""
        if self.mesh.sp_size == 1:
            return local(grid)
        return self.strategy(grid).shard(local, grid)

    def at(self, point: str, local: Local, *args: Any, **options: Any) -> Any:
        """Run the batch's strategy at a hook point. The arguments include the rows held there.

        In a group of one rank it is the bare model's function.
        """
        if self.mesh.sp_size == 1:
            return local(*args, **options)

        rows = next(arg for arg in args if hasattr(arg, "grid"))
        if isinstance(args[0], Tensor) and args[0].shape[:2] != (rows.count, rows.length):
            raise ValueError(
                f"got tokens {tuple(args[0].shape)} as {_described(rows)}; expected "
                f"[{rows.count}, {rows.length}, ..]; pass each point the rows of its tokens"
            )
        return getattr(self.strategy(rows.grid), point)(local, *args, **options)

    def gather(self, local: Local, x: Tensor, rows: Any) -> Any:
        """The whole output, or a ``Shard`` of it if the caller asked for shards."""
        # A call of model.forward(...) bypasses the hook that sets the attribute.
        output, self._output = self._output, "full"
        if output == "shards":
            return Shard(x, rows)

        if self.mesh.sp_size > 1:
            assert self.mesh.sp_group is not None
            counts = self.strategy(rows.grid).row_counts(rows)
            x = gather_rows(x, counts, self.mesh.sp_group)
            rows = rows.take(0, rows.total)
        return local(x, rows)

    def _hook_points(self) -> list[tuple[Any, Local]]:
        """Each hook point of the model with the function to attach."""
        functions: list[tuple[str, Local]] = [(self.plan.leave, self.gather)]
        if self.mesh.shares_batches:
            functions.append((self.plan.enter, self.shard))
            for name in ("switch", "segment", "spatial", "temporal", "tokenwise"):
                hook = partial(self.at, name)
                functions += [(pattern, hook) for pattern in getattr(self.plan, name)]
            for name in ("spatial", "temporal"):
                hook = partial(self.at, f"attend_{name}")
                functions += [(f"{pattern}.attend", hook) for pattern in getattr(self.plan, name)]

        points: list[tuple[Any, Local]] = []
        for pattern, function in functions:
            points += [(point, function) for point in find_modules(self.model, pattern)]
        return points

    def _before_forward(self, hook: Local) -> None:
        self.handles.append(self.model.register_forward_pre_hook(hook, with_kwargs=True))

    def _attach(self) -> None:
        for point, function in self._attachments:
            point.attach(function)

    def _detach(self) -> None:
        for point, _ in reversed(self._attachments):
            point.detach()

    def _take_output_argument(
        self, model: nn.Module, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        self._output = kwargs.pop("output", "full")
        if self._output not in ("full", "shards"):
            raise ValueError(
                f"got output={self._output!r}; expected 'full' or 'shards'; pass one of these"
            )
        return args, kwargs

    def strategy(self, grid: Any) -> Strategy:
        """The strategy for batches of this shape in the current group."""
        # A rank's groups have different sizes.
        key = (self.mesh.sp_size, grid.num_samples, *grid.shape, grid.full)
        if key not in self._strategies:
            width, heads, element_size = 1, 1, 1
            if self.plan.names_hook_points:
                config: Any = self.model.config
                width, heads = config.hidden_size, config.num_heads
                element_size = next(self.model.parameters()).element_size()
            shape = BatchShape.of_grid(grid, width, heads, alternates=self.alternates)
            options = replace(self.options, spans_nodes=self.mesh.spans_nodes)
            chosen = strategy_for(shape, options, self.mesh.sp_size)
            if issubclass(chosen, SplitAttention) and not self.plan.names_hook_points:
                # Ordinary modules hide their heads.
                chosen = SwitchRows
            options = with_chunks(options, shape, self.mesh.sp_size, element_size=element_size)
            self._strategies[key] = chosen(self.mesh.current, options, heads)
        return self._strategies[key]


def _described(rows: Rows) -> str:
    return f"{rows.layout} rows [{rows.start}, {rows.stop}) of {rows.total}"


@takes_options
def parallelize(
    model: Model, mesh: SequenceMesh, options: Options | None = None, **keywords: Any
) -> Model:
    """Make a model compute each batch together with the other ranks of ``mesh.sp_group``.

    On a mesh with ``sp_size="auto"`` that is the group of ``mesh.using(group)`` around forward and
    backward. In a group of one rank, and with ``sp_size=1``, the operators are the bare model's.

    Works in place and returns the same object: same class, parameters and state dict. Every rank of
    the group calls the same model with the same inputs. Models, options, train and gradient modes,
    and shapes and dtypes of inputs that differ are refused on all ranks, by one error that names
    what differs; values are not compared. Models with hook points take one more keyword in
    ``forward``: ``output="full"`` (default) returns the bare model's output on every rank,
    ``output="shards"`` a ``Shard`` of it.

    Args:
        model: one that declares ``sharding_points``, or whose class has a registered ``ShardPlan``.
        mesh: the processes; the ranks of its current group share a batch.
        options: strategy, placement, precision and overlap of the exchanges; defaults are those of
            ``Options``.
        keywords: fields of ``Options`` by name, which override those of ``options``.

    Raises:
        ValueError: if the model has neither hook points nor a plan, is parallelized already, or
            options contradict each other or the plan.
        TypeError: if a keyword is no field of ``Options``.
    """
    options = replace(options or Options(), **keywords)
    if hasattr(model, ATTRIBUTE):
        raise ValueError(
            "got a model that is parallelized already; expected a bare one; call unwrap(model) "
            "first"
        )
    setattr(model, ATTRIBUTE, SequenceParallel(model, mesh, plan_of(model), options))
    if options.verify and mesh.shares_batches:
        verify_first_step(model)
    elif options.verify:
        logger.info(
            "verify=True has no effect: no ranks share a batch; opensora-sp verify CONFIG --ranks "
            "2 compares a small step"
        )
    return model


def held_rows(model: nn.Module, grid: Grid) -> list[list[LatentRows]]:
    """For each rank of the group its rows of a batch, where tokens enter and where they leave.

    With ``output="shards"`` a rank reads these rows of x alone, and returns the latter.

    Args:
        model: a parallelized model with hook points.
        grid: the patches of the batch (``model.config.grid``).
    """
    engine: SequenceParallel = getattr(model, ATTRIBUTE)
    return engine.boundary_rows(grid)


def unwrap(model: Model) -> Model:
    """Undo ``parallelize``: the same object, bare again. A bare model is returned as it is.

    Raises:
        ValueError: if ``model`` is a wrapper (of DDP, a Booster or peft) around a parallelized
            model.
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
