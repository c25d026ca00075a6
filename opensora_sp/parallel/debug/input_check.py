"""A check that all ranks of a group call the same model in the same way, before anything else is sent.

Split sizes follow from shapes and the model alone, so ranks with different ones would wait for each other for ever.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from opensora_sp.parallel.agreement import (
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
from opensora_sp.parallel.mesh import SequenceMesh

from .comm_counter import record
from .comm_timing import communicating


class Kind(NamedTuple):
    """One kind of what ranks have to call a model with alike."""

    name: str
    expected: str
    remedy: str


KINDS = (
    Kind("options", "the same options of parallelize", "pass them alike on every rank"),
    Kind(
        "modes",
        "the same modes",
        "call train() or eval(), set_grad_checkpoint() and no_grad() alike on every rank",
    ),
    Kind("inputs", "the same batch", "give the model the batch of the group's data-parallel rank"),
)


class SameBatch:
    """A forward pre-hook: one number, a digest of the model and of the call, is compared between a group's ranks.

    In every forward, since a rank that has seen its own shape before cannot know that another one has not. The number
    stays on the host, so a GPU never waits for it.

    Args:
        how: the options by which ranks share batches, a dataclass.
    """

    def __init__(self, mesh: SequenceMesh, how: object = None) -> None:
        self.mesh, self.how = mesh, how
        self._form: ModelForm | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mesh.is_imagined:
            return
        self._form = self._form or ModelForm(model)
        entries = self._entries(model, args, kwargs)
        record("check", backward=False, elements=2, element_size=8)
        with communicating("check", torch.device("cpu")):
            agree = all_agree(
                digest(entries, self._form.digest()), self.mesh.host_group, torch.device("cpu")
            )
        if not agree:
            self._refuse(model, entries)

    def _entries(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entries:
        """Whatever decides what is sent, each named by its kind: options, modes, shapes and dtypes of inputs, also
        inside of containers, and plain values."""
        options = fields_of(self.how) if is_dataclass(self.how) else {}
        modes = {"train() or eval()": "train" if model.training else "eval"}
        modes["gradient mode"] = "on" if torch.is_grad_enabled() else "off"
        if hasattr(model, "grad_checkpoint"):
            modes["gradient checkpointing"] = "on" if model.grad_checkpoint else "off"
        leaves, _ = tree_flatten_with_path((args, dict(sorted(kwargs.items()))))

        entries = {f"options {name}": describe(value) for name, value in options.items()}
        entries |= {f"modes {name}": value for name, value in modes.items()}
        return entries | {f"inputs {_name(path)}": describe(value) for path, value in leaves}

    def _refuse(self, model: nn.Module, entries: Entries) -> None:
        """Raise the first reason that there is, the same on all ranks. Collective."""
        group = self.mesh.host_group
        models = gathered(describe_model(model), group)
        if differences(models):
            refuse_models(models, "of one sequence-parallel group")
        found = differences(gathered(entries, group))
        for kind in KINDS:
            own = [
                one.removeprefix(f"{kind.name} ")
                for one in found
                if one.startswith(f"{kind.name} ")
            ]
            if own:
                raise ValueError(
                    f"got different {kind.name} on the ranks of one sequence-parallel group: {first_of(own)}; expected "
                    f"{kind.expected} on all of them; {kind.remedy}"
                )
        self._form = (
            None  # a description of what the model was: parameters were put in or taken out since
        )


def _name(path: tuple[Any, ...]) -> str:
    """``x`` for a keyword, ``0`` for a place, ``frames[1]`` for what lies deeper."""
    first, *deeper = (getattr(key, "key", getattr(key, "idx", key)) for key in path[1:])
    return f"{first}{''.join(f'[{key}]' for key in deeper)}"
