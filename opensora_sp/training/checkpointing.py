"""A training run's checkpoints, which do not depend on the number of processes.

A checkpoint is a folder ``step_00001000`` of whole, named tensors and JSON, without pickles::

    model/config.json  model/model.safetensors     fp32 weights: ZeRO's master weights, frozen ones
    ema/config.json    ema/model.safetensors       EMA weights
    optimizer.safetensors                          "exp_avg/<parameter>", ...
    state.json                                     step, parameter groups, position in the data
    manifest.json                                  size and SHA-256 of every file above
    COMMIT                                         written last: without it this is no checkpoint

``opensora_sp.checkpoint`` writes, verifies and reads such folders; this file decides on their
content.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.checkpoint import (
    CheckpointFolder,
    NamedShards,
    Part,
    SaveJob,
    Saver,
    checkpoint_name,
    committed_checkpoints,
    fitted,
    load_model,
    model_config_json,
    newest_checkpoint,
    on_rank_0,
    open_weights,
    set_aside,
    verify,
)
from opensora_sp.checkpoint.folder import FORMAT, to_json
from opensora_sp.json_reader import read_json
from opensora_sp.models.base import ConditionedModel

from .ema import ShardedEma

logger = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """The tensors of a run.

    Args:
        module: the bare model.
        fixed: its frozen parameters and buffers, as they were before the cast to the training's
            precision.
        shards: trainable weights and optimizer state.
        ema: EMA weights.
    """

    module: ConditionedModel
    fixed: dict[str, Tensor]
    shards: NamedShards
    ema: ShardedEma

    def files(self) -> dict[str, dict[str, Part]]:
        """The tensor files of a checkpoint: for each, this rank's part of each tensor."""
        fixed = {name: Part.whole(tensor, constant=True) for name, tensor in self.fixed.items()}
        return {
            "model/model.safetensors": {**fixed, **self._parts(self.shards.master_weights)},
            "ema/model.safetensors": {**fixed, **self._parts(self.ema.shards)},
            "optimizer.safetensors": self.shards.state_parts(),
        }

    def _parts(self, shards: dict[str, Tensor]) -> dict[str, Part]:
        return {name: self.shards.part(name, shard) for name, shard in shards.items()}

    def load(self, folder: Path) -> dict[str, Any]:
        """Load the tensors of a verified checkpoint, after all names are checked.

        Returns:
            The content of its ``state.json``.

        Raises:
            ValueError: if names, shapes or groups of parameters are those of another model.
        """
        state: dict[str, Any] = read_json(folder / "state.json")
        moments = open_weights(folder / "optimizer.safetensors")
        self.shards.check_state(moments, state["parameter_groups"])
        weights = fitted(open_weights(folder / "model"), self.module)
        ema_weights = fitted(open_weights(folder / "ema"), self.module)

        load_model(weights, self.module, self.shards, self.fixed)
        for name, shard in self.ema.shards.items():
            shard.copy_(self.shards.cut(name, ema_weights.tensors[name].read()))
        # The options of the groups, such as the learning rate, are those of the config.
        self.shards.load_state(moments.tensors, state.get("loss_scale"))
        return state


class Checkpoints:
    """Writes a run's checkpoints. Creating it and every method are collective.

    Args:
        run_dir: folder of the checkpoints.
        keep_last: number of the newest ones to keep; None keeps all.
        keep_every: keep also those whose step is a multiple of this.
        in_background: ``save`` returns when each rank has copied its own shards, and the files
            are written asynchronously. An error is raised by the next ``save`` or by ``wait``.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        in_background: bool = False,
    ) -> None:
        self.run_dir, self.in_background = run_dir, in_background
        self._saver = Saver()
        self._keep: dict[str, Any] = dict(keep_last=keep_last, keep_every=keep_every)

    def save(self, tensors: TrainingState, values: dict[str, Any]) -> Path:
        """Write the checkpoint of ``values["step"]``.

        Args:
            values: JSON values for ``state.json``.

        Raises:
            ValueError, RuntimeError: on every rank, if writing this checkpoint, or the previous one
                in the background, failed; ValueError for a full disk or missing permissions.
        """
        module, shards = tensors.module, tensors.shards
        config = model_config_json(type(module).__name__, module.config)
        state = {
            "format": FORMAT,
            "parameter_groups": shards.groups(),
            **values,
            "loss_scale": shards.optimizer.loss_scale_state(),
        }
        files = {
            "model/config.json": config,
            "ema/config.json": config,
            "state.json": to_json(state),
        }

        final = self.run_dir / checkpoint_name(values["step"])
        folder = CheckpointFolder(final, files, **self._keep)
        self._saver.save(SaveJob(folder, tensors.files()), in_background=self.in_background)
        return final

    def wait(self) -> None:
        """Wait for a save in the background; raises its error on every rank."""
        self._saver.wait()

    def close(self) -> None:
        """Wait for a save in the background, also when the training failed; raises nothing."""
        self._saver.join()


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint of ``--resume auto|PATH``; None if ``auto`` finds none.

    ``auto`` skips checkpoints that are visibly damaged, without reading large files.

    Raises:
        ValueError: if PATH is neither a committed checkpoint nor a folder that holds one, or it
            is damaged.
    """
    if resume == "auto":
        candidates = reversed(committed_checkpoints(run_dir))
        return next((folder for folder in candidates if _looks_whole(folder)), None)

    found = newest_checkpoint(Path(resume))
    if found is None:
        raise ValueError(
            f"got checkpoint path {resume!r}, which holds no committed checkpoint; expected a "
            "folder step_... or a run's folder; check the path"
        )
    verify(found, thorough=False)
    return found


def _looks_whole(folder: Path) -> bool:
    try:
        verify(folder, thorough=False)
    except ValueError:
        # Rank 0 logs the reason in choose_checkpoint.
        return False
    return True


def choose_checkpoint(run_dir: Path, checkpoint: Path | None, *, resume: str | None) -> Path | None:
    """The checkpoint to resume from, verified by rank 0 and visible to every rank. Collective.

    With ``resume="auto"``, damaged checkpoints are set aside, and the newest whole one is chosen.

    Args:
        checkpoint: what ``find_checkpoint`` returned on this rank.

    Raises:
        ValueError: if ranks see different checkpoints, or none is whole.
    """
    agree_on(checkpoint)
    chosen: list[Any] = [checkpoint]
    with on_rank_0("checking a checkpoint") as is_rank_0:
        if is_rank_0 and resume == "auto":
            chosen = [_newest_whole(run_dir)]
        elif is_rank_0 and checkpoint is not None:
            verify(checkpoint)

    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _newest_whole(run_dir: Path) -> Path | None:
    """The newest whole checkpoint, after damaged ones are set aside; None if there is none."""
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
        f"got only damaged checkpoints in {run_dir}, now named *.damaged; expected a whole one; "
        "start again with another --cfg-options outputs=..."
    )


def agree_on(checkpoint: Path | None) -> None:
    """Raise ValueError on every rank unless all of them see the same checkpoint. Collective."""
    own = None if checkpoint is None else (checkpoint.name, (checkpoint / "COMMIT").read_text())
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, own)

    if any(other != seen[0] for other in seen):
        names = [None if other is None else other[0] for other in seen]
        raise ValueError(
            f"got different checkpoints on different ranks ({names}, rank by rank); expected the "
            "same; put the run's folder on a disk that all nodes share"
        )


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of frozen parameters and buffers; training casts the model's own to its precision."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    tensors = model.state_dict().items()
    return {name: tensor.clone() for name, tensor in tensors if name not in trained}
