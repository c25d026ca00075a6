"""Sequence parallelism for models that name no sharding points: a plan, as data, of where to take hold of them.

Such a model keeps its tokens in one tensor with an axis of frames and one of patches. A rank then holds a run of the
frames of every sample (before modules that attend over patches) or a run of the patches (before modules that attend
over frames); torch's forward hooks on the modules that the plan lists do the rest. The model is not edited.

Hooks can be passed by (``checkpoint(block.forward, ...)`` skips them), so their calls are counted in every forward.

Legend: b samples, t frames, s patches of a frame, c channels.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import exchange, gather_rows
from .debug.input_check import SameBatch
from .layout import balanced_run, plan_exchange, run_sizes
from .mesh import SequenceMesh
from .options import Options
from .typed import Arguments

TOKENS = ("b t s c", "b (t s) c")
SHARDED_ALONG = {"spatial": "t", "temporal": "s"}
COPIED = "got a parallelized model to copy or pickle; expected a bare one; copy before parallelize, or unwrap(model) first"


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Where to take hold of a model. Modules are dotted names, in which * stands for one part, or a part of one.

    Args:
        enter: the module before which tokens are cut; its first argument are all tokens.
        spatial, temporal: modules that attend over the patches of a frame, over the frames of a patch. Each takes the
            tokens as first argument and returns as many.
        leave: the module behind which the outputs of all ranks are put together; what it returns has the tokens' axes.
        tokens: the tokens' axes, "b t s c" or "b (t s) c".
        placement: "stream" where the modules listed follow each other and hand on all there is; "branch" where what
            they return is added to tokens that went past them.
        arguments: axes of other arguments of the modules listed, by name: a tensor "b t" is cut to the frames held
            here, an integer "t" becomes their number. "b (t s) c" needs an integer argument of ``enter`` with axis "t".
    """

    enter: str
    spatial: tuple[str, ...]
    temporal: tuple[str, ...]
    leave: str
    tokens: str = "b t s c"
    placement: str = "stream"
    arguments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise ValueError(
                f"got tokens {self.tokens!r}; expected one of {TOKENS}; rearrange before {self.enter!r}"
            )
        if self.placement not in ("stream", "branch"):
            raise ValueError(
                f"got placement {self.placement!r}; expected 'stream' or 'branch'; choose one of them"
            )
        for name, axes in self.arguments.items():
            if not axes or set(axes.split()) - {"b", "t", "s", "c"}:
                raise ValueError(
                    f"got axes {axes!r} for argument {name!r}; expected some of b, t, s, c; write for example 'b t'"
                )

    def hooks(self, model: nn.Module, mesh: SequenceMesh, options: Options) -> PlanHooks:
        """Hang the plan on a model."""
        if options != Options():
            raise ValueError(
                f"got {options} for a model that takes part by a ShardPlan; expected the defaults; name "
                "sharding_points in the model to choose how ranks share it (docs/custom_model.md)"
            )
        return PlanHooks(self, model, mesh)


_PLANS: dict[type[nn.Module], ShardPlan] = {}


def register_plan(model_class: type[nn.Module], plan: ShardPlan) -> None:
    """Let ``parallelize``, and with it the plugin, take models of this class by this plan."""
    _PLANS[model_class] = plan


def registered_plan(model: nn.Module) -> ShardPlan | None:
    """The plan registered for the class of a model or for a class it derives from."""
    return next((_PLANS[cls] for cls in type(model).__mro__ if cls in _PLANS), None)


def find(model: nn.Module, pattern: str) -> list[Any]:
    """Modules whose dotted name fits a pattern, where * stands for one part of it, or for some of its letters."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [module for name, module in model.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ValueError(
            f"got {pattern!r} as the place of a sharding point, which fits no module of {type(model).__name__}; "
            "expected the name of one; correct its sharding_points or ShardPlan"
        )
    return found


@dataclass
class _Pass:
    """One forward pass: the sizes b, t, s of its batch, the layout its stream is in, and in which each module was
    given its tokens."""

    sizes: dict[str, int]
    layout: str | None = "temporal"
    came_in: dict[nn.Module, str] = field(default_factory=dict)


def _recomputes() -> bool:
    """Whether autograd is running, so that a forward is one of checkpointing's."""
    return torch._C._current_graph_task_id() != -1


class PlanHooks:
    """What hangs on a model that takes part by a plan.

    Recomputation under checkpointing fires the hooks of modules again. It belongs to the pass whose output's gradient
    came last, so the output's hook makes that pass the one at hand again.
    """

    exact = True  # nothing is rounded on its way

    def __init__(self, plan: ShardPlan, model: nn.Module, mesh: SequenceMesh) -> None:
        self.plan, self.model, self.mesh = plan, model, mesh
        self.suspended = False  # while True, the model is as it was
        self.handles: list[Any] = []
        self._pass = _Pass({}, layout=None)
        if mesh.sp_size > 1:
            self._attach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(COPIED)

    def _attach(self) -> None:
        plan, model = self.plan, self.model
        enter, leave = self._only(plan.enter), self._only(plan.leave)
        self._listed: dict[nn.Module, str] = {}
        for layout, patterns in (("spatial", plan.spatial), ("temporal", plan.temporal)):
            for module in (module for pattern in patterns for module in find(model, pattern)):
                if self._listed.setdefault(module, layout) != layout:
                    raise ValueError(
                        f"got {self._name(module)!r} as spatial and temporal in one ShardPlan; expected one of them; "
                        "list the attentions inside it instead"
                    )
        guard = self._unless_suspended  # all modules are there: from here on nothing fails
        self.handles += [
            model.register_forward_pre_hook(SameBatch(self.mesh, self.plan), with_kwargs=True),
            enter.register_forward_pre_hook(guard(self._enter), with_kwargs=True),
        ]
        for module in self._listed:
            self.handles.append(
                module.register_forward_pre_hook(guard(self._before), with_kwargs=True)
            )
            if plan.placement == "branch":
                self.handles.append(module.register_forward_hook(guard(self._behind_branch)))
        self.handles.append(leave.register_forward_hook(guard(self._leave)))
        self.handles.append(model.register_forward_hook(guard(self._finished)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _only(self, pattern: str) -> nn.Module:
        found = find(self.model, pattern)
        if len(found) > 1:
            raise ValueError(
                f"got {pattern!r} in a ShardPlan, which fits {len(found)} modules; expected one; write its whole name"
            )
        only: nn.Module = found[0]
        return only

    def _unless_suspended(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if self.suspended else hook(*args)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Cut the tokens to this rank's run of patches, for all frames."""
        bound = self._bound(module, args, kwargs)
        name, x = next(iter(bound.arguments.items()))
        if not _recomputes():
            frames = (
                x.shape[1]
                if self.plan.tokens == "b t s c"
                else self._frames(module, bound.arguments)
            )
            self._pass = _Pass({"b": x.shape[0], "t": frames, "s": x.shape[1:-1].numel() // frames})
        whole = self._sharded(x, None)[:, :, slice(*self._run("s"))]
        bound.arguments[name] = self._flat(whole)
        return self._cut_arguments(bound, "temporal")

    def _frames(self, module: nn.Module, arguments: Mapping[str, Any]) -> int:
        names = [name for name, axes in self.plan.arguments.items() if axes == "t"]
        if len(names) != 1 or not isinstance(arguments.get(names[0]), int):
            raise ValueError(
                f"got tokens 'b (t s) c' and the arguments {dict(self.plan.arguments)}; expected one with axis 't', "
                f"the number of frames that {self.plan.enter!r} is called with; name it in ShardPlan(arguments=...)"
            )
        frames: int = arguments[names[0]]
        return frames

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Bring the tokens of a listed module into the layout that it attends in."""
        now, wanted = self._pass, self._listed[module]
        if not _recomputes():
            assert now.layout is not None
            if module in now.came_in:
                raise ValueError(
                    f"got {self._name(module)!r} twice in one forward; expected each module of a ShardPlan once; list "
                    "the modules around it"
                )
            now.came_in[module] = now.layout
            if self.plan.placement == "stream":
                now.layout = wanted
        bound = self._bound(module, args, kwargs)
        name, x = next(iter(bound.arguments.items()))
        bound.arguments[name] = self._switched(x, now.came_in[module], wanted)
        return self._cut_arguments(bound, wanted)

    def _behind_branch(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._switched(output, self._listed[module], self._pass.came_in[module])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        now = self._pass
        if _recomputes() or not isinstance(output, Tensor):
            raise ValueError(
                f"got {self.plan.leave!r}, which {'is recomputed' if _recomputes() else 'returns no tensor'}; expected "
                "a module behind all that is checkpointed, which returns the tokens; name another one as leave"
            )
        missing = [self._name(m) for m in self._listed if m not in now.came_in]
        if missing:
            raise ValueError(
                f"got a forward that passed by {len(missing)} modules of its ShardPlan ({missing[0]}, ...); "
                "expected a call of each; call modules, not their forward methods (checkpoint(block, x))"
            )
        assert now.layout is not None
        along, now.layout = SHARDED_ALONG[now.layout], None
        x, dim = self._sharded(output, along), 1 if along == "t" else 2
        sizes = run_sizes(now.sizes[along], self.mesh.sp_size)
        whole = gather_rows(x.transpose(0, dim).contiguous(), sizes, self._group)
        whole = self._flat(whole.transpose(0, dim))
        if whole.requires_grad:
            whole.register_hook(partial(self._resume, now))
        return whole

    def _resume(self, earlier: _Pass, grad: Tensor) -> None:
        self._pass = earlier

    def _finished(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._pass.layout is not None:
            raise ValueError(
                f"got a forward that did not call {self.plan.leave!r}; expected its call, where the ranks' outputs are "
                "put together; correct leave in the ShardPlan"
            )

    def _switched(self, x: Tensor, left: str, entered: str) -> Tensor:
        """``[b, frames held, s, c]`` <-> ``[b, t, patches held, c]``."""
        if left == entered:
            return x
        layouts = {"spatial": "t | b s", "temporal": "s | b t"}
        plan = plan_exchange(
            self._pass.sizes,
            layouts[left],
            layouts[entered],
            self.mesh.sp_size,
            self.mesh.sp_rank,
            x.device,
        )
        x = self._sharded(x, SHARDED_ALONG[left])  # [b, t, s, c], one of t and s held in part
        b, t, s = self._pass.sizes["b"], self._pass.sizes["t"], self._pass.sizes["s"]
        tokens = x.permute(1, 0, 2, 3) if left == "spatial" else x.permute(2, 0, 1, 3)
        tokens = exchange(tokens.flatten(0, 2), plan, self._group)
        if entered == "temporal":
            x = tokens.view(-1, b, t, x.shape[-1]).permute(1, 2, 0, 3)
        else:
            x = tokens.view(-1, b, s, x.shape[-1]).permute(1, 0, 2, 3)
        return self._flat(x)

    def _bound(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        return inspect.signature(module.forward).bind(*args, **kwargs)

    def _cut_arguments(self, bound: inspect.BoundArguments, layout: str) -> Arguments:
        """Cut the arguments that the plan gives axes for to what is held in a layout."""
        axis = SHARDED_ALONG[layout]
        for name, axes in self.plan.arguments.items():
            if axis in axes.split() and bound.arguments.get(name) is not None:
                bound.arguments[name] = self._cut(name, bound.arguments[name], axes.split(), axis)
        return bound.args, bound.kwargs

    def _cut(self, name: str, value: Any, axes: list[str], axis: str) -> Any:
        start, stop = self._run(axis)
        if isinstance(value, int):
            return stop - start
        expected = [self._pass.sizes.get(name, size) for name, size in zip(axes, value.shape)]
        if value.ndim != len(axes) or list(value.shape) != expected:
            raise ValueError(
                f"got {name!r} of shape {tuple(value.shape)}; expected axes {' '.join(axes)} of sizes "
                f"{[self._pass.sizes.get(one, 'any') for one in axes]}; correct arguments in the ShardPlan"
            )
        return value.narrow(axes.index(axis), start, stop - start)

    def _sharded(self, x: Tensor, along: str | None) -> Tensor:
        """``[b, t, s, c]``, of which t or s is held in part."""
        if self.plan.tokens == "b t s c":
            return x
        held = dict(self._pass.sizes)
        if along is not None:
            start, stop = self._run(along)
            held[along] = stop - start
        unflattened: Tensor = x.unflatten(1, (held["t"], held["s"]))
        return unflattened

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2) if self.plan.tokens == "b (t s) c" else x

    def _run(self, axis: str) -> tuple[int, int]:
        return balanced_run(self._pass.sizes[axis], self.mesh.sp_size, self.mesh.sp_rank)

    def _name(self, module: nn.Module) -> str:
        return next(
            str(name) for name, candidate in self.model.named_modules() if candidate is module
        )

    @property
    def _group(self) -> Any:
        return self.mesh.sp_group
