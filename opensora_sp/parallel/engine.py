"""The engine of sequence parallelism: it runs a batch's strategy at the hook points of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from .batch_shape import BatchShape, Grid, LatentRows, Rows, alternates
from .collectives import gather_rows
from .input_check import InputCheck
from .mesh import SequenceMesh
from .options import Options
from .shard_plan import ShardPlan
from .strategies import registered_strategies, strategy_for, with_chunks
from .strategies.heads import SplitAttention
from .strategies.rows import SwitchRows
from .strategies.strategy import (
    AttendFn,
    AttentionFn,
    Block,
    Function,
    ShardFn,
    Strategy,
    SwitchFn,
    Tensors,
)
from .strategies.token_exchange import BranchSwitch
from .token_plan import TokenPlan

Attachment: TypeAlias = tuple[Any, Callable[..., Any]]
"""A hook point, and the function to attach: ``function(local, *args)``."""

# The attribute of a parallelized model that holds its engine.
ATTRIBUTE = "_sequence_parallel"


class ForwardPoint:
    """A module as a hook point: its ``forward`` runs inside of the function attached."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._replaced: dict[str, Any] = {}

    def attach(self, function: Callable[..., Any]) -> None:
        """Let ``function(forward, *args, **kwargs)`` compute each call of the module."""
        instance, forward = vars(self.module), self.module.forward
        # Another point of the same module, or a tool such as accelerate, may have set one.
        self._replaced = {"forward": instance["forward"]} if "forward" in instance else {}

        # Copying a partial, unlike a closure, copies what it holds, and so is refused.
        attached: Any = partial(function, forward)
        # Points of modules bind the arguments of a call by it, also where two share a module.
        attached.__signature__ = inspect.signature(forward)
        instance["forward"] = attached

    def detach(self) -> None:
        """Restore ``forward``. Points of one module are detached last to first."""
        del vars(self.module)["forward"]
        vars(self.module).update(self._replaced)


@dataclass(frozen=True)
class Shard:
    """The part of a model's output that this rank holds (not the hook point of this name).

    ``tensor`` is ``[R, T, patch volume * C_out]`` with rows (sample, patch), or ``[R, S, ...]``
    with rows (sample, frame), both batch-major. ``rows`` describes them:
    ``rows.slice(z)`` cuts the same patches out of any whole ``[B, C, T, H, W]``, ``[B, T]`` or
    ``[B, T, H, W]`` tensor, and ``rows.inside(device)`` distinguishes latent positions from
    padding.
    """

    tensor: Tensor
    rows: LatentRows


class SequenceParallel:
    """The engine: what ``parallelize`` attaches to the hook points and the forward of a model.

    Its methods for hook points get the function of the point on one rank (``local``) and the
    point's arguments, and run the strategy of the batch.
    """

    def __init__(
        self, model: nn.Module, mesh: SequenceMesh, plan: ShardPlan | TokenPlan, options: Options
    ) -> None:
        self.model, self.mesh = model, mesh
        self.plan: Any = plan
        self.alternates = alternates(getattr(model, "config", None))
        self.options = options if plan.names_hook_points else _supported(options)
        self.handles: list[Any] = []
        self._check = InputCheck(mesh, options, plan, _strategy_labels)
        # Of the forward that runs.
        self._output = "full"
        self._strategies: dict[tuple[int, ...], Strategy] = {}
        self._attachments: list[Attachment] = []

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

    def attach(self, attachments: Sequence[Attachment]) -> None:
        """Attach functions to hook points, in this order, and the check of inputs."""
        self._attachments = [*attachments]
        self._attach()
        # Alone, nobody could disagree, and each forward would pay for the digest.
        if self.mesh.shares_batches:
            check = self.model.register_forward_pre_hook(self._check, with_kwargs=True)
            self.handles.append(check)

    def boundary_rows(self, grid: Grid) -> list[list[LatentRows]]:
        """For each rank of the group its rows where tokens enter and where they leave."""
        strategy = self.strategy(grid)
        boundaries = strategy.boundary_rows(grid.rows("spatial"))
        if not self.alternates:
            # Tokens leave as they enter.
            boundaries = boundaries[:1]

        def rows_of(rank: int) -> list[Any]:
            return [rows.take(*strategy.row_ranges(rows)[rank]) for rows in boundaries]

        return [rows_of(rank) for rank in range(self.mesh.sp_size)]

    # Hook points.

    def forward(self, local: Function, *args: Any, output: str = "full", **kwargs: Any) -> Any:
        """The model's forward with one more keyword, which ``gather`` reads."""
        if output not in ("full", "shards"):
            raise ValueError(
                f"got output={output!r}; expected 'full' or 'shards'; pass one of these"
            )
        # The call that runs is the innermost: a model may call itself.
        outer, self._output = self._output, output
        try:
            return local(*args, **kwargs)
        finally:
            self._output = outer

    def shard(self, local: ShardFn, grid: Grid) -> Rows:
        """The rows that this rank holds where tokens enter."""
        # A single rank needs no operator to find that it holds all rows.
        if self.mesh.sp_size == 1:
            return local(grid)
        return self.strategy(grid).shard(local, grid)

    def switch(self, local: SwitchFn, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        return self._strategy_at(rows, x).switch(local, x, rows)

    def self_attention(
        self, local: AttentionFn, x: Tensor, rows: Rows, precomputed: Any = None, *, block: Block
    ) -> Tensor:
        return self._strategy_at(rows, x).self_attention(local, x, rows, precomputed, block)

    def attend(
        self,
        local: AttendFn,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        groups: Any,
        *,
        block: Block,
    ) -> Tensor:
        return self._strategy_at(rows, q).attend(local, q, k, v, rows, groups, block)

    def segment(
        self, local: Function, work: Function, rows: Rows, *args: Any, recompute: Any, last: bool
    ) -> Tensor:
        strategy = self._strategy_at(rows, args[0])
        return strategy.segment(local, work, rows, *args, recompute=recompute, last=last)

    def tokenwise(
        self,
        local: Any,
        function: Function,
        rows: Rows,
        tokens: Tensors,
        entries: Tensors,
        part: Any,
    ) -> Tensor:
        return self._strategy_at(rows, tokens[0]).tokenwise(function, rows, tokens, entries, part)

    def gather(self, local: Callable[[Tensor, Any], Tensor], x: Tensor, rows: Any) -> Any:
        """The whole output, or a ``Shard`` of it if the caller asked for shards."""
        # Losses of single tokens need no other rank's rows.
        if self._output == "shards":
            return Shard(x, rows)

        # A single rank of a nested family has no process group.
        if self.mesh.sp_size > 1:
            assert self.mesh.sp_group is not None
            counts = self.strategy(rows.grid).row_counts(rows)
            x = gather_rows(x, counts, self.mesh.sp_group)
            rows = rows.take(0, rows.total)
        return local(x, rows)

    def strategy(self, grid: Any) -> Strategy:
        """The strategy for batches of this shape in the current group."""
        # A rank's groups have different sizes.
        key = (self.mesh.sp_size, grid.num_samples, *grid.shape, grid.full)
        if key not in self._strategies:
            self._strategies[key] = self._make_strategy(grid)
        return self._strategies[key]

    def _make_strategy(self, grid: Any) -> Strategy:
        # The groups of one rank may have different links.
        options = replace(self.options, spans_nodes=self.mesh.spans_nodes)
        ranks, names_hook_points = self.mesh.sp_size, self.plan.names_hook_points
        # Costs are compared for the model's sizes; of ordinary modules these are not known.
        width, heads, element_size = 1, 1, 1
        if names_hook_points:
            config: Any = self.model.config
            width, heads = config.hidden_size, config.num_heads
            # Autocast would send fewer bytes. An estimate suffices here, since any number of chunks
            # is exact.
            element_size = next(self.model.parameters()).element_size()

        shape = BatchShape.of_grid(grid, width, heads, alternates=self.alternates)
        chosen = strategy_for(shape, options, ranks)
        if issubclass(chosen, SplitAttention) and not names_hook_points:
            # Ordinary modules hide their heads.
            chosen = SwitchRows
        if chosen is SwitchRows and self.plan.placement == "branch":
            # Nothing else of such a model can be switched.
            chosen = BranchSwitch
        options = with_chunks(options, shape, ranks, element_size=element_size)
        return chosen(self.mesh.current, options, heads)

    def _strategy_at(self, rows: Rows, x: Tensor) -> Strategy:
        """The strategy for the batch of these rows, which are the rows of the tokens ``x``."""
        if isinstance(x, Tensor) and x.shape[:2] != (rows.count, rows.length):
            raise ValueError(
                f"got tokens {tuple(x.shape)} as {rows.layout} rows [{rows.start}, {rows.stop}) of "
                f"{rows.total}; expected [{rows.count}, {rows.length}, ..]; pass each point the "
                "rows of its tokens"
            )
        return self.strategy(rows.grid)

    def _attach(self) -> None:
        for point, function in self._attachments:
            point.attach(function)

    def _detach(self) -> None:
        # A module with two functions gets its own forward back last.
        for point, _ in reversed(self._attachments):
            point.detach()


def _strategy_labels() -> list[str]:
    return [strategy.label for strategy in registered_strategies()]


def _supported(options: Options) -> Options:
    """The options as they apply to ordinary modules.

    Ordinary modules hide their queries, keys and values, and the code between them is unknown.
    So attention cannot be split by heads, and no exchange can be in flight between two of them.

    Raises:
        ValueError: if the modules of the plan do not allow the options.
    """
    matches = [s for s in registered_strategies() if s.option == options.strategy]
    if all(issubclass(strategy, SplitAttention) for strategy in matches):
        raise ValueError(
            f"got strategy {options.strategy!r} for a ShardPlan of ordinary modules; expected "
            "'switch' or 'split_gather': queries, keys and values inside of modules are out of "
            "reach; choose one of these, or write the model with hook points "
            "(docs/custom_model.md)"
        )

    if options.overlaps:
        raise ValueError(
            f"got overlap_chunks {options.overlap_chunks} and overlap_backward "
            f"{options.overlap_backward} for a ShardPlan of ordinary modules; expected 1 and "
            "False: tokens in flight cannot pass through code between modules; leave the "
            "overlap out, or write the model with hook points (docs/custom_model.md)"
        )

    return replace(options, overlap_chunks=1)
