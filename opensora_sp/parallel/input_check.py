"""A check that all ranks of a group call the same model in the same way, before anything else is
sent.

Split sizes follow from shapes and the model alone, so ranks that differ in them would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from .agreement import (
    Entries,
    ModelForm,
    all_agree,
    describe,
    describe_model,
    differences,
    digest,
    fields_of,
    first_of,
    gathered,
    refuse_models,
)
from .communication import communicating, record
from .mesh import SequenceMesh

# What to do where entries of a kind differ, by the first word of their names. Differences of an
# earlier kind cause differences of a later one.
REMEDIES = {
    "options": "pass the same options of parallelize on every rank",
    "strategies": "call register_strategy alike, in the same order, on every rank",
    "plan": "register the same ShardPlan on every rank",
    "modes": "call train() or eval(), set_grad_checkpoint() and no_grad() alike on every rank",
    "inputs": "give the model the batch of the group's data-parallel rank",
}


class InputCheck:
    """A forward pre-hook that compares a digest of the model and of the call between the ranks of a
    group.

    It runs in every forward: a rank that has seen a shape before cannot know that another rank has
    not. The digest stays on the host, so a GPU never waits for it. In a group of one rank there is
    nothing to compare.

    Args:
        options, plan: dataclasses on which exchanges depend.
        strategies: returns the labels of the strategies in the order in which they are asked.

    Raises:
        ValueError: when called, the same on all ranks, if anything differs.
    """

    def __init__(
        self, mesh: SequenceMesh, options: Any, plan: Any, strategies: Callable[[], list[str]]
    ) -> None:
        self.mesh, self._strategies = mesh, strategies
        self._fixed = {**_entries_of("options", options), **_entries_of("plan", plan)}
        self._form: ModelForm | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mesh.is_imagined or self.mesh.sp_size == 1:
            return
        # The description of a model takes longer than a small forward.
        self._form = self._form or ModelForm(model)
        entries = self._entries(model, args, kwargs)
        rank_digest = digest(entries, self._form.digest())

        host = torch.device("cpu")
        record("check", backward=False, elements=2, element_size=8)
        # Over the host's group: an all-reduce on the device would make the host wait for the GPU's
        # queue.
        with communicating("check", host):
            agree = all_agree(rank_digest, self.mesh.host_group, host)
        if not agree:
            self._refuse(model, entries)

    def _entries(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entries:
        """Entries that decide which bytes are sent: options, strategies, plan, modes, and the form
        of the inputs.

        Of inputs, also inside of containers, these are shapes, dtypes and plain values.
        """
        entries = dict(self._fixed)
        # The link follows from it, and from that the strategy and the number of chunks. Nodes of
        # different sizes (LOCAL_WORLD_SIZE) may count groups of one degree differently.
        entries["options group spans nodes"] = describe(self.mesh.spans_nodes)
        # They may be registered at any time.
        entries["strategies registered"] = describe(self._strategies())
        entries["modes train() or eval()"] = "train" if model.training else "eval"
        entries["modes gradient mode"] = "on" if torch.is_grad_enabled() else "off"
        if hasattr(model, "grad_checkpoint"):
            entries["modes gradient checkpointing"] = str(model.grad_checkpoint)

        # Sorted: ranks may pass the same keywords in another order.
        leaves, _ = tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
        return entries | {f"inputs {_name(path)}": describe(leaf) for path, leaf in leaves}

    def _refuse(self, model: nn.Module, entries: Entries) -> None:
        """Raise the first reason that there is, the same on all ranks. Collective."""
        group = self.mesh.host_group
        # Of another model, inputs differ as well: the model is the first reason.
        models = gathered(describe_model(model), group)
        refuse_models(differences(models), "of one sequence-parallel group")

        differing = differences(gathered(entries, group))
        for kind, remedy in REMEDIES.items():
            prefix = f"{kind} "
            matches = [text.removeprefix(prefix) for text in differing if text.startswith(prefix)]
            if matches:
                raise ValueError(
                    f"got different {kind} on the ranks of one sequence-parallel group: "
                    f"{first_of(matches)}; expected the same {kind} on all of them; {remedy}"
                )

        # Only the digests of the models differ: parameters were added or removed since they were
        # made.
        self._form = None


def _entries_of(kind: str, settings: Any) -> Entries:
    return {f"{kind} {name}": describe(field) for name, field in fields_of(settings).items()}


def _name(path: tuple[Any, ...]) -> str:
    """``x`` for a keyword, ``0`` for a position, ``frames[1]`` for what lies deeper."""
    first, *deeper = (getattr(key, "key", getattr(key, "idx", key)) for key in path[1:])
    return f"{first}{''.join(f'[{key}]' for key in deeper)}"
