"""A training run's checkpoints, which do not depend on the processes that wrote them.

A checkpoint is a folder ``step_00001000`` of whole, named tensors and JSON; nothing in it is pickled::

    model/config.json  model/model.safetensors     fp32 weights: ZeRO's masters, and what is not trained
    ema/config.json    ema/model.safetensors       their moving average
    optimizer.safetensors                          "exp_avg/<parameter>", ...
    state.json                                     step, parameter groups and what else a run needs to go on
    manifest.json                                  size and SHA-256 of every file above
    COMMIT                                         written last: without it the folder is not a checkpoint

``storage/`` writes and checks such folders; this file says what is in them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from opensora_sp.checkpoint import (
    CheckpointFolder,
    Disk,
    Part,
    SaveJob,
    Saver,
    Weights,
    checkpoint_name,
    committed_checkpoints,
    fitted,
    model_config_json,
    newest_checkpoint,
    on_rank_0,
    open_weights,
    set_aside,
    verify,
)
from opensora_sp.checkpoint.folder import FORMAT, to_json
from opensora_sp.models.base import ConditionedModel

from .ema import ShardedEma

if TYPE_CHECKING:
    from opensora_sp.plugin import NamedShards

logger = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """The tensors of a run.

    ``module``: the bare model. ``fixed``: its frozen parameters and buffers as they were before they were cast to the
    training's precision. ``shards``, ``ema``: trainable weights and optimizer state, and the averages.
    """

    module: ConditionedModel
    fixed: dict[str, Tensor]
    shards: NamedShards
    ema: ShardedEma

    def files(self) -> dict[str, dict[str, Part]]:
        """The tensor files of a checkpoint: for each, this rank's part of each tensor."""
        fixed = {name: Part.whole(tensor, constant=True) for name, tensor in self.fixed.items()}
        weights = {
            name: self.shards.part(name, shard)
            for name, shard in self.shards.master_weights.items()
        }
        averages = {name: self.shards.part(name, shard) for name, shard in self.ema.shards.items()}
        return {
            "model/model.safetensors": {**fixed, **weights},
            "ema/model.safetensors": {**fixed, **averages},
            "optimizer.safetensors": self.shards.state_parts(),
        }

    def load(self, folder: Path) -> dict[str, Any]:
        """Take over the tensors of a verified checkpoint; returns its ``state.json``. Checks names before it changes.

        Raises:
            ValueError: if names, shapes or groups of parameters are those of another model.
        """
        state = json.loads((folder / "state.json").read_text())
        self.shards.check_groups(state["parameter_groups"], folder)
        self.shards.check_states(
            shapes_in(folder / "optimizer.safetensors"), folder / "optimizer.safetensors"
        )
        weights, averages = (
            fitted(open_weights(folder / part), self.module) for part in ("model", "ema")
        )
        load_model(weights, self.module, self.fixed, self.shards)
        for name, shard in self.ema.shards.items():
            shard.copy_(self.shards.cut(name, averages.tensors[name].read()))
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.shards.working}
        with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
            for key in file.keys():
                kind, name = key.split("/", 1)
                found[name][kind] = file.get_tensor(key)
        for name, moments in found.items():
            self.shards.set_state(name, moments)
        self.shards.optimizer.set_loss_scale_state(state.get("loss_scale"))
        return state


class Checkpoints:
    """Writes a run's checkpoints. Creating and every method is collective.

    Args:
        run_dir: folder that holds them.
        keep_last: keep so many of the newest ones; None keeps all.
        keep_every: and those whose step is a multiple of this.
        in_background: ``save`` returns when each rank has copied its own shards; the writing goes on beside the
            training. An error shows at the next ``save`` or at ``wait``.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        in_background: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.run_dir, self.in_background = run_dir, in_background
        self._saver = Saver()
        self._how: dict[str, Any] = dict(keep_last=keep_last, keep_every=keep_every, disk=disk)

    def save(self, tensors: TrainingState, values: dict[str, Any]) -> Path:
        """Write the checkpoint of ``values["step"]``; ``values`` are JSON, for ``state.json``.

        Raises:
            ValueError, RuntimeError: on every rank, if writing this one, or the last in the background, failed; the
                former if for want of room or leave to write.
        """
        config = model_config_json(type(tensors.module).__name__, tensors.module.config)
        state = {"format": FORMAT, "parameter_groups": tensors.shards.groups(), **values}
        state["loss_scale"] = tensors.shards.optimizer.loss_scale_state()
        small = {
            "model/config.json": config,
            "ema/config.json": config,
            "state.json": to_json(state),
        }
        folder = CheckpointFolder(
            self.run_dir / checkpoint_name(values["step"]), small, **self._how
        )
        self._saver.save(SaveJob(folder, tensors.files()), in_background=self.in_background)
        return folder.final

    def wait(self) -> None:
        """Until nothing is being written; raises on every rank what went wrong."""
        self._saver.wait()

    def close(self) -> None:
        """Let what is being written come to its end, also when the training did not; raises nothing."""
        self._saver.join()


def load_model(
    weights: Weights,
    module: ConditionedModel,
    fixed: dict[str, Tensor],
    shards: NamedShards,
    *,
    convert: Collection[str] = (),
) -> None:
    """Put opened weights into the boosted model: masters, working parameters, and what is not trained.

    Each rank reads one tensor after the other and keeps its shards.
    """
    weights = fitted(weights, module, convert=convert)
    weights.log()
    tensors = module.state_dict()
    for name, stored in weights.tensors.items():
        whole = stored.read()
        if name in shards.master_weights:
            shards.set_weight(name, whole)
        else:
            fixed[name] = whole.to(fixed[name].dtype, copy=True)
            tensors[name].copy_(whole)


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that ``--resume auto|PATH`` means; None if ``auto`` finds none.

    ``auto`` passes over checkpoints that are seen to be damaged without reading all of them.

    Raises:
        ValueError: if PATH is neither a committed checkpoint nor a folder that holds one, or it is damaged.
    """
    if resume == "auto":
        return next(
            (folder for folder in reversed(committed_checkpoints(run_dir)) if _looks_whole(folder)),
            None,
        )
    found = newest_checkpoint(Path(resume))
    if found is None:
        raise ValueError(
            f"got checkpoint path {resume!r}, which holds no committed checkpoint; expected a folder step_... or a "
            "run's folder; check the path"
        )
    verify(found, thorough=False)
    return found


def _looks_whole(folder: Path) -> bool:
    try:
        verify(folder, thorough=False)
    except ValueError:
        return False  # rank 0 says so in choose_checkpoint
    return True


def choose_checkpoint(run_dir: Path, checkpoint: Path | None, *, resume: str | None) -> Path | None:
    """The checkpoint to go on from, read and checked by rank 0 and seen by every rank. Collective.

    With ``resume="auto"``, damaged checkpoints are set aside, and the newest whole one before them is taken.

    Args:
        checkpoint: what this rank has found.

    Raises:
        ValueError: if ranks see different checkpoints, or none is whole.
    """
    agree_on(checkpoint)
    chosen: list[Any] = [checkpoint]
    with on_rank_0("checking a checkpoint") as checker:
        if checker and resume == "auto":
            chosen = [_newest_whole(run_dir)]
        elif checker and checkpoint is not None:
            verify(checkpoint)
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _newest_whole(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; None if there never was one."""
    candidates = committed_checkpoints(run_dir)
    for candidate in reversed(candidates):
        try:
            verify(candidate)
            return candidate
        except ValueError as error:
            logger.warning("%s; set aside as %s", error, set_aside(candidate).name)
    if not candidates:
        return None
    raise ValueError(
        f"got only damaged checkpoints in {run_dir}, now named *.damaged; expected a whole one; start again "
        "with another --cfg-options outputs=..."
    )


def agree_on(checkpoint: Path | None) -> None:
    """Raise ValueError on every rank unless all of them see the same checkpoint. Collective."""
    mine = None if checkpoint is None else (checkpoint.name, (checkpoint / "COMMIT").read_text())
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    if any(other != seen[0] for other in seen):
        names = [None if other is None else other[0] for other in seen]
        raise ValueError(
            f"got different checkpoints on different ranks ({names}, rank by rank); expected the same; put the run's "
            "folder on a disk that all nodes share"
        )
