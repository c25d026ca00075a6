"""Sequence parallelism: attached to a model from outside, and detached again.

A ``ShardPlan`` names the hook points where tokens enter, change layout, attend and leave.
``parallelize`` attaches a parallel strategy there, chosen for each shape. At the last point the
output rows of all ranks are gathered, or stay where they are as a ``Shard``.

The gradient rule: the mean over the ranks of each rank's gradient is the gradient of the mean of
the ranks' losses. On a mesh of nested groups it holds for the sum of the losses of all groups
(docs/concepts/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from .batch_shape import Grid, LatentRows
from .engine import ATTRIBUTE, Attachment, ForwardPoint, SequenceParallel
from .mesh import SequenceMesh
from .options import Options
from .shard_plan import ShardPlan, find_modules, plan_of
from .token_plan import TokenPlan

Model = TypeVar("Model", bound=nn.Module)


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
        options: strategy and overlap of the exchanges; by default ``Options()``.
        keywords: fields of ``Options`` by name, which override ``options``.

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
    plan = plan_of(model)
    engine = SequenceParallel(model, mesh, plan, options)
    # All modules are found before anything is attached: a wrong plan leaves the model as it was.
    attachments: list[Attachment] = []
    if plan.names_hook_points:
        attachments = _hook_points(engine)
    elif mesh.shares_batches:
        # Models with hook points, such as all of this package, need none of it.
        if isinstance(plan, TokenPlan):
            from .token_points import TokenPoints

            attachments = TokenPoints(engine).attachments()
        else:
            from .module_points import ModulePoints

            attachments = ModulePoints(engine).attachments()
    engine.attach(attachments)
    setattr(model, ATTRIBUTE, engine)

    # After the engine is attached: verification detaches and attaches it.
    if options.verify and mesh.shares_batches:
        # A tool that few runs ask for.
        from .parity import verify_first_step

        verify_first_step(model)
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
    # By named modules: a wrapper may answer for the attributes of the model inside of it.
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


def _hook_points(engine: SequenceParallel) -> list[Attachment]:
    """Each hook point of a model with the function to attach."""
    plan: ShardPlan = engine.plan
    # Without other ranks, output="shards" works all the same.
    functions: list[tuple[str, Callable[..., Any]]] = [(plan.leave, engine.gather)]
    if engine.mesh.shares_batches:
        functions.append((plan.enter, engine.shard))
        functions += [(pattern, engine.switch) for pattern in plan.switch]
        functions += [(pattern, engine.segment) for pattern in plan.segment]
        functions += [(pattern, engine.tokenwise) for pattern in plan.tokenwise]
        for pattern in plan.spatial:
            functions.append((pattern, partial(engine.self_attention, block="spatial")))
            functions.append((f"{pattern}.attend", partial(engine.attend, block="spatial")))
        for pattern in plan.temporal:
            functions.append((pattern, partial(engine.self_attention, block="temporal")))
            functions.append((f"{pattern}.attend", partial(engine.attend, block="temporal")))

    points: list[Attachment] = [(ForwardPoint(engine.model), engine.forward)]
    for pattern, function in functions:
        points += [(point, function) for point in find_modules(engine.model, pattern)]
    return points
