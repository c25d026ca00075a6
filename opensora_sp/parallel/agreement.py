"""Comparison between ranks: whether they hold the same entries, and if not, the first difference.

Ranks compare one number, a digest of their entries. Only if it differs, they gather the entries
themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Entries = dict[str, str]
ABSENT = "absent"


def digest(entries: Mapping[str, str], *more: str) -> str:
    """A digest of entries, in their order, and of other digests."""
    hashed = hashlib.blake2b(digest_size=7)
    for text in (*more, *chain.from_iterable(entries.items())):
        hashed.update(f"{text}\0".encode())
    return hashed.hexdigest()


def all_agree(own: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks of a group have the same digest. Collective."""
    number = int(own, 16)
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest_negated = both.tolist()
    return bool(largest == -smallest_negated)


def gathered(own: Entries, group: dist.ProcessGroup | None) -> dict[int, Entries]:
    """The entries of all ranks of a group, by global rank. Collective."""
    ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    seen: list[Any] = [None] * len(ranks)
    dist.all_gather_object(seen, own, group=group)
    return dict(zip(ranks, seen, strict=True))


def differences(seen: Mapping[int, Entries]) -> list[str]:
    """The entries that differ between ranks, in order, with each rank's value."""
    names = dict.fromkeys(chain.from_iterable(seen.values()))
    found = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, entries in seen.items():
            values.setdefault(entries.get(name, ABSENT), []).append(rank)
        if len(values) > 1:
            listed = [f"{value} on {_ranks(ranks)}" for value, ranks in values.items()]
            found.append(f"{name} is {', '.join(listed)}")
    return found


def first_of(found: Sequence[str]) -> str:
    """The first difference, and how many there are beside it."""
    others = len(found) - 1
    if not others:
        return found[0]
    return f"{found[0]} (and {others} more {'entries' if others > 1 else 'entry'})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def describe(value: Any) -> str:
    """Shape and dtype of a tensor, a plain value as it is, what a container holds, or the type."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}".replace("torch.", "")
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, Mapping):
        entries = [f"{key}: {describe(one)}" for key, one in value.items()]
        return f"{{{', '.join(entries)}}}"

    # Encoded text describes itself: each rank holds the captions of its own tokens.
    if isinstance(form := getattr(value, "shared_form", None), str):
        return form
    if is_dataclass(value) and not isinstance(value, type):
        described = map(describe, fields_of(value).values())
        return f"{type(value).__name__} {' '.join(described)}"
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def fields_of(value: Any) -> dict[str, Any]:
    """A dataclass' fields by name, not deeper."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def describe_model(model: nn.Module) -> Entries:
    """Class, config, and name, shape, dtype and trainability of each parameter; no values."""
    entries = {"the class": f"{type(model).__module__}.{type(model).__qualname__}"}
    for name, value in _config(model):
        entries[f"config.{name}"] = describe(value)
    for name, parameter in model.named_parameters():
        trainability = "trainable" if parameter.requires_grad else "frozen"
        entries[f"parameter {name}"] = f"{describe(parameter)} {trainability}"
    return entries


def _config(model: nn.Module) -> Iterable[tuple[str, Any]]:
    """Entries of a config: a dataclass, a dict, or an object with ``to_dict``; no private ones."""
    config: Any = getattr(model, "config", None)
    if is_dataclass(config):
        config = fields_of(config)
    elif callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    named = config.items() if isinstance(config, Mapping) else ()
    return [(str(name), value) for name, value in named if not str(name).startswith("_")]


class ModelForm:
    """The digest of a model's description, cached until modules or parameters change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # The submodules and the parameters of each module, which may be replaced.
        self._children: list[dict[str, Any]] = []
        self._parameters: list[dict[str, Any]] = []
        self._state: list[Any] | None = None
        self._digest = ""

    def digest(self) -> str:
        if self._state is None or self._read_state() != self._state:
            modules = list(self.model.modules())
            self._children = [module._modules for module in modules]
            self._parameters = [module._parameters for module in modules]
            self._state = self._read_state()
            self._digest = digest(describe_model(self.model))
        return self._digest

    def _read_state(self) -> list[Any]:
        # Modules themselves, since the id of one that is gone may be given to another.
        modules = chain.from_iterable(table.values() for table in self._children)
        parameters = chain.from_iterable(table.values() for table in self._parameters)
        forms = [(p.requires_grad, p.dtype, p.shape) for p in parameters if p is not None]
        return [*modules, *forms]


def check_same_model(model: nn.Module, device: torch.device) -> None:
    """Compare a model between all ranks of the default process group, before they share it.
    Collective.

    Raises:
        ValueError: the same on all ranks, naming the first entry that differs.
    """
    own = describe_model(model)
    if not all_agree(digest(own), None, device):
        refuse_models(differences(gathered(own, None)), "of the run")


def refuse_models(found: Sequence[str], which: str) -> None:
    """Raise the error of models that differ between the ranks ``which``, if they do."""
    if found:
        raise ValueError(
            f"got different models on the ranks {which}: {first_of(found)}; expected the same "
            "class, config and parameters (names, shapes, dtypes, trainable or frozen) on all of "
            "them; build, cast and freeze the model alike on every rank"
        )
