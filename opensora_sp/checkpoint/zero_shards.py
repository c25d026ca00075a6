"""Whole, named tensors to and from the shards that ZeRO keeps on each rank.

ZeRO flattens a tensor, pads it to a multiple of the world size, and gives each rank an equal,
contiguous shard. Whole tensors by name do not depend on the world size, so any number of processes
can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .reader import Stored, Weights
from .tensor_file import Spec
from .writer import Part


class NamedShards:
    """A boosted model's trainable parameters by name, with this rank's shards of what ZeRO keeps.

    Args:
        module: the model without ZeRO's wrapper.
        optimizer: the plugin's, with fp32 master weights by the ``id`` of a parameter.

    Attributes:
        working: the model's own parameters, in the training's precision.
        master_weights: this rank's shards of the fp32 master weights.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self.optimizer = optimizer
        master_of = optimizer.get_working_to_master_map()
        self.working = {name: p for name, p in module.named_parameters() if id(p) in master_of}
        self.master_weights: dict[str, Tensor] = {
            name: master_of[id(p)] for name, p in self.working.items()
        }

    def states(self) -> dict[str, dict[str, Tensor | int]]:
        """The optimizer's state by parameter, shards and scalars; empty before the first step."""
        return {
            name: dict(self.optimizer.optim.state.get(master, {}))
            for name, master in self.master_weights.items()
        }

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor, on every rank and its device. Collective."""
        like = self.working[name]
        flat = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard.contiguous())
        return flat[: like.numel()].view(like.shape)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, on the device and in the dtype of the master."""
        master, world = self.master_weights[name], dist.get_world_size()
        flat = F.pad(whole.reshape(-1), (0, master.numel() * world - whole.numel()))
        return flat.view(world, -1)[dist.get_rank()].to(master).clone()

    # Saving

    def part(self, name: str, shard: Tensor) -> Part:
        """This rank's part of a tensor that has the shape of a parameter."""
        return Part(shard, Spec(shard.dtype, tuple(self.working[name].shape)), sharded=True)

    def state_parts(self) -> dict[str, Part]:
        """The optimizer's state: ``"exp_avg/<parameter>"``, ``"step/<parameter>"``, ..."""
        parts = {}
        for name, state in self.states().items():
            for kind, moment in state.items():
                if isinstance(moment, Tensor) and moment.ndim:
                    parts[f"{kind}/{name}"] = self.part(name, moment)
                elif moment is not None:
                    # HybridAdam counts its steps in an int.
                    parts[f"{kind}/{name}"] = Part.whole(torch.as_tensor(moment))
        return parts

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups as JSON values: names of parameters, and options."""
        names = {id(master): name for name, master in self.master_weights.items()}
        return [
            {"parameters": [names[id(p)] for p in group["params"]], **_json_values(group)}
            for group in self.optimizer.param_groups
        ]

    # Loading

    def check_state(self, state: Weights, groups: list[dict[str, Any]]) -> None:
        """Check a saved optimizer state before ``load_state``.

        Args:
            state: tensors named as in ``state_parts``.
            groups: saved ``groups``.

        Raises:
            ValueError: if parameters, their groups or their shapes belong to another model.
        """
        self._check_groups(groups, state.path)

        for key, shape in state.shapes.items():
            parameter = self.working.get(_parameter(key))
            if parameter is None or shape not in ((), tuple(parameter.shape)):
                expected = "no such parameter" if parameter is None else list(parameter.shape)
                raise ValueError(
                    f"got optimizer state of another model in {state.path}: {key} is "
                    f"{list(shape)}; expected {expected}; change the checkpoint or the model"
                )

    def _check_groups(self, saved: list[dict[str, Any]], source: Any) -> None:
        """Raise ValueError unless the saved groups hold the same parameters, in the same order."""
        here = [group["parameters"] for group in self.groups()]
        there = [group["parameters"] for group in saved]
        if here != there:
            sizes = [len(names) for names in there], [len(names) for names in here]
            raise ValueError(
                f"got optimizer state of other parameter groups in {source}, of {sizes[0]} "
                f"parameters; expected the same parameters in the same groups, {sizes[1]}; build "
                "the optimizer as it was when the state was saved"
            )

    def load_state(
        self, tensors: Mapping[str, Stored], loss_scale: dict[str, float] | None
    ) -> None:
        """Replace the state of every parameter, and in fp16 the loss scale, by a checked one."""
        states: dict[str, dict[str, Stored]] = {name: {} for name in self.working}
        for key, stored in tensors.items():
            states[_parameter(key)][key.partition("/")[0]] = stored

        # One parameter after the other, so that few whole tensors are in memory.
        for name, state in states.items():
            self.set_state(name, {kind: stored.read() for kind, stored in state.items()})
        self.optimizer.set_loss_scale_state(loss_scale)

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the options of the parameter groups, such as the learning rate, to checked ones."""
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key in saved.keys() & group.keys():
                # JSON has no tuples.
                is_tuple = isinstance(group[key], tuple)
                group[key] = tuple(saved[key]) if is_tuple else saved[key]

    @torch.no_grad()
    def set_weight(self, name: str, whole: Tensor) -> None:
        """Copy a whole fp32 tensor into the master shard and the working parameter."""
        self.master_weights[name].copy_(self.cut(name, whole))
        self.working[name].copy_(whole)

    def set_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Replace the state of a parameter by whole tensors; integer scalars become int."""
        local: dict[str, Tensor | int] = {}
        for kind, whole in state.items():
            if whole.ndim:
                local[kind] = self.cut(name, whole)
            else:
                # A mapped tensor may not be changed, and the optimizer counts its steps in place.
                local[kind] = whole.clone() if whole.is_floating_point() else int(whole)

        # Assigned rather than copied: before its first step an optimizer has no state to copy into.
        self.optimizer.optim.state[self.master_weights[name]] = local


def copy_weights(
    weights: Weights,
    module: nn.Module,
    shards: NamedShards | None,
    fixed: dict[str, Tensor] | None = None,
) -> None:
    """Copy checked weights into a boosted model, each rank one whole tensor after the other.

    Args:
        weights: all or some of the model's tensors, whole; see ``fitted`` and ``check_names``.
        module: the model without ZeRO's wrapper, whose own tensors are set.
        shards: of its trainable parameters, which go into the master weights as well; None for a
            model without a ZeRO optimizer.
        fixed: copies of the other tensors in the dtype of the checkpoints, which are replaced.
    """
    weights.log()
    tensors = module.state_dict()
    for name, stored in weights.tensors.items():
        whole = stored.read()
        if shards is not None and name in shards.master_weights:
            shards.set_weight(name, whole)
            continue

        tensors[name].copy_(whole)
        if fixed is not None:
            # The model's own tensor has been rounded to the training's precision.
            fixed[name] = whole.to(fixed[name].dtype, copy=True)


def _parameter(key: str) -> str:
    """The parameter's name in ``"exp_avg/<parameter>"``."""
    return key.partition("/")[2]


def _json_values(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that JSON can hold; tensors become numbers."""
    options = {}
    for key, option in group.items():
        number = option.item() if isinstance(option, Tensor) else option
        if key != "params" and isinstance(number, bool | int | float | str | list | tuple | None):
            options[key] = number
    return options
