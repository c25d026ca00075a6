"""Ordinary modules as hook points, for models that were not written with any.

Such a model keeps its tokens in one tensor with an axis of frames and one of patches. A rank holds
a contiguous range of the frames of every sample where modules attend over patches, and of the
patches where they attend over frames. ``ModulePoints`` translates the calls of the modules that a
``ShardPlan`` lists into the calls that hook points make, so that the same engine and strategies
serve both. The model is not edited: the ``forward`` of these modules is replaced on the instance,
and ``detach`` restores it.

A rank without rows computes one made-up row, since modules of any kind need not accept none. What
comes of it is dropped, so its gradients are zeros.

To the engine a batch is one sample whose tokens are ``[b, c]``: a row is one frame, or one patch,
of all samples.

Legend: b samples, t frames, s patches of a frame, c channels, R rows held, L tokens of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.common.graphs import Context, after_backward, is_backward_running

from .collectives import Received
from .engine import Attachment, ForwardPoint, SequenceParallel
from .shard_plan import find_modules
from .strategies.strategy import Block

# The axis that counts the rows of a layout, and the one within a row.
ROW_AXIS = {"spatial": "t", "temporal": "s"}
TOKEN_AXIS = {"spatial": "s", "temporal": "t"}


class ModuleCall:
    """A call of a module: its arguments by name, of which the first are the tokens."""

    def __init__(self, forward: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        self._forward, self._bound = forward, bound
        self.arguments = bound.arguments
        self._first = next(iter(bound.arguments), "")
        self._others: tuple[Any, ...] | None = None

    @property
    def tokens(self) -> Any:
        return self.arguments[self._first]

    def run(self) -> Any:
        """Call the module with the arguments as they are now."""
        return self._forward(*self._bound.args, **self._bound.kwargs)

    def run_on(self, tokens: Tensor) -> Any:
        """The output for these tokens; other entries of a tuple are kept for ``returned``."""
        self.arguments[self._first] = tokens
        out = self.run()
        if isinstance(out, tuple):
            out, *others = out
            self._others = tuple(others)
        return out

    def returned(self, tokens: Tensor) -> Any:
        """The return value of the call, with these tokens as output."""
        return tokens if self._others is None else (tokens, *self._others)


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a batch: frames x patches of ``[b, c]``; ``axes`` is ``ShardPlan.tokens``."""

    b: int
    frames: int
    patches_per_frame: int
    axes: str
    num_samples: int = 1
    full: bool = False
    windows: None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.frames, self.patches_per_frame, 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"b": self.b, "t": self.frames, "s": self.patches_per_frame}

    def rows(self, layout: str) -> TokenRows:
        return TokenRows(self, layout, 0, self.sizes[ROW_AXIS[layout]])


@dataclass(frozen=True)
class TokenRows:
    """The rows ``[start, stop)``: frames ("spatial") or patches ("temporal") of all samples."""

    grid: TokenGrid
    layout: str
    start: int
    stop: int

    @property
    def total(self) -> int:
        return self.grid.sizes[ROW_AXIS[self.layout]]

    @property
    def length(self) -> int:
        return self.grid.frames * self.grid.patches_per_frame // self.total

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def num_computed(self) -> int:
        """The rows that modules see."""
        return max(self.count, 1)

    def take(self, start: int, stop: int) -> TokenRows:
        return replace(self, start=start, stop=stop)

    def transposed(self) -> TokenRows:
        return self.grid.rows("temporal" if self.layout == "spatial" else "spatial")

    def transpose(self, x: Tensor) -> tuple[Tensor, TokenRows]:
        """All rows ``[R, L, b, c]`` in the other layout."""
        # As exchanges return it, so that modules see the same strides on any number of ranks.
        return x.transpose(0, 1).contiguous(), self.transposed()

    def to_rows(self, x: Tensor) -> Tensor:
        """Tokens of these rows in the axes of the model -> ``[R, L, b, c]``."""
        sizes = {ROW_AXIS[self.layout]: self.num_computed, TOKEN_AXIS[self.layout]: self.length}
        return rearrange(x, f"{self.grid.axes} -> {self._pattern}", **sizes)[: self.count]

    def from_rows(self, x: Tensor, *, copy: bool = False) -> Tensor:
        """``[R, L, b, c]`` -> tokens in the axes of the model, contiguous."""
        if self.count == 0:
            # Values that vary: of equal ones a norm may have no gradient. The graph is continued,
            # since this rank takes part in the exchanges of backward.
            numbers = torch.linspace(-1, 1, x.shape[1:].numel())
            x = torch.cat([x, numbers.to(x).view(1, *x.shape[1:])])
        x = rearrange(x, f"{self._pattern} -> b t s c")
        x = x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous()
        return rearrange(x, f"b t s c -> {self.grid.axes}")

    @property
    def _pattern(self) -> str:
        return f"{ROW_AXIS[self.layout]} {TOKEN_AXIS[self.layout]} b c"


@dataclass
class _Pass:
    """One forward pass.

    ``entry_rows`` are the rows in which its tokens entered, ``stream_rows`` the rows of the
    residual stream (None once it has left), ``module_rows`` the rows of each module's tokens.
    ``kept`` has the contexts in which modules are recomputed, with what they received from other
    ranks.
    """

    entry_rows: TokenRows | None = None
    stream_rows: TokenRows | None = None
    module_rows: dict[nn.Module, TokenRows] = field(default_factory=dict)
    kept: dict[nn.Module, Context] = field(default_factory=dict)


class ModulePoints:
    """The hook points of a model whose plan lists ordinary modules.

    Recomputation under gradient checkpointing calls modules again. It belongs to the pass whose
    output received its gradient last, so a hook on that output makes this pass the current one
    again.
    """

    def __init__(self, engine: SequenceParallel) -> None:
        self.engine, self.plan, self.model = engine, engine.plan, engine.model
        self.enter, self.leave = self._only(self.plan.enter), self._only(self.plan.leave)
        self.layouts = self._layouts()
        self._pass = _Pass()
        # Modules under gradient checkpointing, which only the first backward pass shows.
        self._recomputed: set[nn.Module] = set()

    def attachments(self) -> list[Attachment]:
        """Each point with the function to attach, the innermost function of a module first."""
        functions: list[tuple[nn.Module, Callable[[ModuleCall], Any]]] = [
            *((module, partial(self._attend, module)) for module in self.layouts),
            (self.enter, self._shard),
            (self.leave, self._gather),
            (self.model, self._forward),
        ]
        points: list[Attachment] = []
        for module, function in functions:
            call = partial(self._call, function, inspect.signature(module.forward))
            points.append((ForwardPoint(module), call))
        return points

    def _call(
        self,
        function: Callable[[ModuleCall], Any],
        signature: inspect.Signature,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the function, or the bare module in a group of one rank."""
        if self.engine.mesh.sp_size == 1:
            return forward(*args, **kwargs)
        return function(ModuleCall(forward, signature.bind(*args, **kwargs)))

    def _layouts(self) -> dict[nn.Module, Block]:
        """The layout that each listed module attends in."""
        layouts: dict[nn.Module, Block] = {}
        for pattern in self.plan.spatial:
            layouts |= dict.fromkeys(find_modules(self.model, pattern), "spatial")
        for pattern in self.plan.temporal:
            for module in find_modules(self.model, pattern):
                if layouts.setdefault(module, "temporal") != "temporal":
                    raise ValueError(
                        f"got {self._name(module)!r} as spatial and temporal in one ShardPlan; "
                        "expected one of them; list the attentions inside it instead"
                    )
        return layouts

    def _only(self, pattern: str) -> nn.Module:
        matches = find_modules(self.model, pattern)
        if len(matches) > 1:
            raise ValueError(
                f"got {pattern!r} in a ShardPlan, which matches {len(matches)} modules; expected "
                "one; write its whole name"
            )
        module: nn.Module = matches[0]
        return module

    def _forward(self, call: ModuleCall) -> Any:
        """Run the model and check that its tokens were gathered."""
        output = call.run()
        if self._pass.stream_rows is not None:
            raise ValueError(
                f"got a forward that did not call {self.plan.leave!r}; expected its call, where "
                "the ranks' outputs are gathered; correct leave in the ShardPlan"
            )
        return output

    def _shard(self, call: ModuleCall) -> Any:
        """Shard the tokens, and the arguments of ``enter``."""
        if not is_backward_running():
            grid: Any = self._grid(call)
            entered: Any = self.engine.shard(lambda grid: grid.rows("spatial"), grid)
            self._pass = _Pass(entered, entered)
        rows = self._pass.entry_rows
        assert rows is not None

        # What also attends cuts its arguments by itself.
        if self.enter not in self.layouts:
            self._cut_arguments(call, rows)
        everything = rows.take(0, rows.total)
        x = everything.to_rows(call.tokens)[rows.start : rows.stop]  # [R, L, b, c]
        return call.returned(call.run_on(rows.from_rows(x)))

    def _attend(self, module: nn.Module, call: ModuleCall) -> Any:
        """Call a listed module with tokens in the layout that it attends in."""
        now = self._pass
        rows: Any
        if is_backward_running():
            self._recomputed.add(module)
            rows, kept = now.module_rows[module], now.kept.pop(module, None)
        else:
            rows = self._note_call(module)
            # Tokens received in forward wait for the recomputation, which sends nothing.
            kept = self._keep(module, rows)

        run = partial(self._run, call, is_kept=kept is not None)
        with kept or nullcontext():
            x = rows.to_rows(call.tokens)  # [R, L, b, c]
            block = self.layouts[module]
            if rows.layout != block:
                x, rows = self.engine.switch(lambda x, rows: rows.transpose(x), x, rows)
            x = self.engine.self_attention(run, x, rows, block=block)

        if not is_backward_running():
            now.stream_rows = rows
        return call.returned(rows.from_rows(x, copy=kept is not None))

    def _run(
        self, call: ModuleCall, x: Tensor, rows: TokenRows, precomputed: None, *, is_kept: bool
    ) -> Tensor:
        self._cut_arguments(call, rows)
        # Kept tensors stay as they were received, also if modules work in place.
        return rows.to_rows(call.run_on(rows.from_rows(x, copy=is_kept)))

    def _gather(self, call: ModuleCall) -> Tensor:
        """Gather the output of ``leave``."""
        output, now = call.run(), self._pass
        if is_backward_running() or not isinstance(output, Tensor):
            problem = "is recomputed" if is_backward_running() else "returns no tensor"
            raise ValueError(
                f"got {self.plan.leave!r}, which {problem}; expected a module behind all that is "
                "checkpointed, which returns the tokens; name another one as leave"
            )
        missing = [self._name(m) for m in self.layouts if m not in now.module_rows]
        if missing:
            raise ValueError(
                f"got a forward that bypassed {len(missing)} modules of its ShardPlan "
                f"({missing[0]}, ...); expected a call of each; call modules, not forward methods "
                "that were looked up before parallelize"
            )

        rows, now.stream_rows = now.stream_rows, None
        assert rows is not None
        x = rows.to_rows(output)
        whole: Tensor = self.engine.gather(lambda x, rows: rows.from_rows(x), x, rows)
        # Without a graph there is no backward that could recompute modules of this pass.
        if whole.requires_grad:
            whole.register_hook(partial(self._resume, now))
        return whole

    def _resume(self, earlier: _Pass, grad: Tensor) -> None:
        self._pass = earlier
        after_backward(partial(self._drop_kept, earlier))

    def _drop_kept(self, ended: _Pass) -> None:
        """Drop received tokens of modules that this backward pass has not recomputed."""
        self._recomputed -= ended.kept.keys()
        ended.kept.clear()

    def _note_call(self, module: nn.Module) -> TokenRows:
        """Note a module's first call in a forward; the rows of the stream."""
        now = self._pass
        if module in now.module_rows:
            raise ValueError(
                f"got {self._name(module)!r} twice in one forward; expected each module of a "
                "ShardPlan once; list the modules around it"
            )
        if now.stream_rows is None:
            raise ValueError(
                f"got a call of {self._name(module)!r} outside of enter {self.plan.enter!r} and "
                f"leave {self.plan.leave!r}; expected it between the two; correct the ShardPlan"
            )
        now.module_rows[module] = now.stream_rows
        return now.stream_rows

    def _keep(self, module: nn.Module, rows: TokenRows) -> Context | None:
        """A context that keeps what the module receives from other ranks, if it is recomputed."""
        options = self.engine.options
        resends = options.recompute_communication or self.engine.strategy(rows.grid).resends(
            options
        )
        if resends or module not in self._recomputed or not torch.is_grad_enabled():
            return None
        received = Received()
        self._pass.kept[module] = received.reusing()
        return received.keeping()

    def _grid(self, call: ModuleCall) -> TokenGrid:
        x, axes = call.tokens, self.plan.tokens
        frames = x.shape[1] if axes == "b t s c" else self._frames(call.arguments)
        return TokenGrid(x.shape[0], frames, x.shape[1:-1].numel() // frames, axes)

    def _frames(self, arguments: Mapping[str, Any]) -> int:
        names = [name for name, axes in self.plan.arguments.items() if axes == "t"]
        if len(names) != 1 or not isinstance(arguments.get(names[0]), int):
            raise ValueError(
                f"got tokens 'b (t s) c' and the arguments {dict(self.plan.arguments)}; expected "
                f"one with axis 't', the number of frames that {self.plan.enter!r} is called with; "
                "name it in ShardPlan(arguments=...)"
            )
        frames: int = arguments[names[0]]
        return frames

    def _cut_arguments(self, call: ModuleCall, rows: TokenRows) -> None:
        """Cut the arguments that the plan gives axes for to these rows."""
        for name, axes in self.plan.arguments.items():
            if ROW_AXIS[rows.layout] in axes.split() and call.arguments.get(name) is not None:
                call.arguments[name] = self._cut(name, call.arguments[name], axes.split(), rows)

    def _cut(self, name: str, argument: Any, axes: list[str], rows: TokenRows) -> Any:
        if isinstance(argument, int):
            # Blocks are called with the number of frames that they see: on a rank without any, the
            # made-up one.
            return rows.num_computed
        sizes = rows.grid.sizes
        expected = [sizes.get(axis, size) for axis, size in zip(axes, argument.shape)]
        if argument.ndim != len(axes) or list(argument.shape) != expected:
            raise ValueError(
                f"got {name!r} of shape {tuple(argument.shape)}; expected axes {' '.join(axes)} of "
                f"sizes {[sizes.get(axis, 'any') for axis in axes]}; correct arguments in the "
                "ShardPlan"
            )
        # Ranges without rows may begin behind the last one.
        start = min(rows.start, rows.total - rows.num_computed)
        return argument.narrow(axes.index(ROW_AXIS[rows.layout]), start, rows.num_computed)

    def _name(self, module: nn.Module) -> str:
        names: dict[nn.Module, str] = {m: name for name, m in self.model.named_modules()}
        return names[module]
