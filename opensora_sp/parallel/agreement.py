"""Comparison between ranks of entries, such as of a model, up to the first difference.

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
    # 7 bytes: the number and its negative fit into int64, which collectives of all backends reduce.
    hashed = hashlib.blake2b(digest_size=7)
    for text in (*more, *chain.from_iterable(entries.items())):
        # The separator keeps ("ab", "c") and ("a", "bc") apart.
        hashed.update(f"{text}\0".encode())
    return hashed.hexdigest()


def all_agree(rank_digest: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True if all ranks of a group have the same digest. Collective."""
    number = int(rank_digest, 16)
    # One reduction gives the maximum and the minimum, which are equal if and only if all are.
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest_negated = both.tolist()
    return bool(largest == -smallest_negated)


def gathered(entries: Entries, group: dist.ProcessGroup | None) -> dict[int, Entries]:
    """The entries of all ranks of a group, by global rank. Collective."""
    ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    seen: list[Any] = [None] * len(ranks)
    dist.all_gather_object(seen, entries, group=group)
    return dict(zip(ranks, seen, strict=True))


def differences(seen: Mapping[int, Entries]) -> list[str]:
    """The entries that differ between ranks, in order, with each rank's value."""
    names = dict.fromkeys(chain.from_iterable(seen.values()))
    differing = []
    for name in names:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, entries in seen.items():
            # An entry that only some ranks have is a difference as well.
            ranks_by_text.setdefault(entries.get(name, ABSENT), []).append(rank)
        if len(ranks_by_text) > 1:
            listed = [f"{text} on {_ranks(ranks)}" for text, ranks in ranks_by_text.items()]
            differing.append(f"{name} is {', '.join(listed)}")
    return differing


def first_of(differing: Sequence[str]) -> str:
    """The first difference, and the number of others."""
    others = len(differing) - 1
    if not others:
        return differing[0]
    return f"{differing[0]} (and {others} more {'entries' if others > 1 else 'entry'})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def describe(argument: Any) -> str:
    """Shape and dtype of a tensor, a plain value as it is, what a container holds, or the type."""
    if isinstance(argument, Tensor):
        return f"{list(argument.shape)} {argument.dtype}".replace("torch.", "")
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return repr(argument)
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(describe, argument))}]"
    if isinstance(argument, Mapping):
        entries = [f"{key}: {describe(entry)}" for key, entry in argument.items()]
        return f"{{{', '.join(entries)}}}"

    # Encoded text describes itself: each rank holds the captions of its local tokens.
    if isinstance(form := getattr(argument, "shared_form", None), str):
        return form
    if is_dataclass(argument) and not isinstance(argument, type):
        described = map(describe, fields_of(argument).values())
        return f"{type(argument).__name__} {' '.join(described)}"
    return str(argument) if isinstance(argument, torch.dtype) else type(argument).__name__


def fields_of(argument: Any) -> dict[str, Any]:
    """A dataclass' fields by name, not deeper."""
    return {field.name: getattr(argument, field.name) for field in fields(argument)}


def describe_model(model: nn.Module) -> Entries:
    """Class, config, and name, shape, dtype and trainability of each parameter; no values."""
    entries = {"the class": f"{type(model).__module__}.{type(model).__qualname__}"}
    for name, setting in _config(model):
        entries[f"config.{name}"] = describe(setting)
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
    return [(str(name), setting) for name, setting in named if not str(name).startswith("_")]


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
    entries = describe_model(model)
    if not all_agree(digest(entries), None, device):
        refuse_models(differences(gathered(entries, None)), "of the run")


def refuse_models(differing: Sequence[str], which: str) -> None:
    """Raise the error of models that differ between the ranks ``which``, if they do."""
    if differing:
        raise ValueError(
            f"got different models on the ranks {which}: {first_of(differing)}; expected the same "
            "class, config and parameters (names, shapes, dtypes, trainable or frozen) on all of "
            "them; build, cast and freeze the model alike on every rank"
        )
