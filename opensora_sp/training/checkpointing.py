"""A training run's checkpoints, which do not depend on the number of processes.

A checkpoint is a folder ``step_00001000`` of whole, named tensors and JSON, without pickles::

    model/config.json  model/model.safetensors     fp32 weights: ZeRO's master weights, frozen ones
    ema/config.json    ema/model.safetensors       EMA weights
    optimizer.safetensors                          "exp_avg/<parameter>", ...
    state.json                                     step, parameter groups, position in the data
    manifest.json                                  size and SHA-256 of every file above
    COMMIT                                         written last: without it this is no checkpoint

A run with ``lora`` saves its adapters alone, in peft's layout: ``model`` and ``ema`` have
``adapter_config.json``, ``adapter_model.safetensors`` and ``base.json`` in place of
``model.safetensors``.

``opensora_sp.checkpoint`` writes, verifies and reads such folders; this file decides on their
content.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.adapters import ADAPTER_WEIGHTS, name_on_disk, open_adapters
from opensora_sp.checkpoint.checkpoint_folder import (
    FORMAT,
    CheckpointFolder,
    DamagedCheckpointError,
    read_commit,
    set_aside,
    to_json,
)
from opensora_sp.checkpoint.hub import describe_missing
from opensora_sp.checkpoint.model_config import model_config_json
from opensora_sp.checkpoint.paths import (
    all_checkpoints,
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    had_checkpoints,
    newest_checkpoint,
)
from opensora_sp.checkpoint.reader import Weights, open_weights
from opensora_sp.checkpoint.state_dict import check_names, fitted
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver, on_rank_0
from opensora_sp.checkpoint.zero_shards import NamedShards, copy_weights
from opensora_sp.common.files import read_json
from opensora_sp.models.base import ConditionedModel

from .trainable import LoraRun, ShardedEma

logger = logging.getLogger(__name__)
RESUME = "resume from the last good checkpoint with --resume auto"


@dataclass
class TrainingState:
    """The tensors of a run.

    Args:
        fixed: its frozen parameters and buffers, as they were before the cast to the training's
            precision.
        shards: trainable weights and optimizer state.
        lora: of a run that trains adapters; then nothing is ``fixed``, since the weights that they
            are for are not saved.
    """

    module: ConditionedModel
    fixed: dict[str, Tensor]
    shards: NamedShards
    ema: ShardedEma
    lora: LoraRun | None = None

    def files(self) -> dict[str, dict[str, Part]]:
        """The tensor files of a checkpoint: for each, this rank's part of each tensor."""
        file = "model.safetensors" if self.lora is None else ADAPTER_WEIGHTS
        return {
            f"model/{file}": self._parts(self.shards.master_weights),
            f"ema/{file}": self._parts(self.ema.shards),
            "optimizer.safetensors": self.shards.state_parts(),
        }

    def _parts(self, shards: dict[str, Tensor]) -> dict[str, Part]:
        parts = {name: Part.whole(tensor, constant=True) for name, tensor in self.fixed.items()}
        for name, shard in shards.items():
            stored = name if self.lora is None else name_on_disk(name)
            parts[stored] = self.shards.part(name, shard)
        return parts

    def json_files(self) -> dict[str, bytes]:
        """The small files next to the tensors: configurations of the model, and of adapters."""
        files = {
            "config.json": model_config_json(type(self.module).__name__, self.module.config),
            **({} if self.lora is None else self.lora.files()),
        }
        model = {f"model/{name}": content for name, content in files.items()}
        return model | {f"ema/{name}": content for name, content in files.items()}

    def load(self, folder: Path) -> dict[str, Any]:
        """Load the tensors of a verified checkpoint, after all names are checked.

        Returns:
            The content of its ``state.json``.

        Raises:
            ValueError: if names, shapes or groups of parameters belong to another model.
        """
        state: dict[str, Any] = read_json(folder / "state.json")
        # All names are checked before anything is loaded, so an error leaves the model as it was.
        moments = open_weights(folder / "optimizer.safetensors")
        self.shards.check_state(moments, state["parameter_groups"])
        weights, ema_weights = self._opened(folder / "model"), self._opened(folder / "ema")

        copy_weights(weights, self.module, self.shards, self.fixed)
        for name, shard in self.ema.shards.items():
            shard.copy_(self.shards.cut(name, ema_weights.tensors[name].read()))
        # The config has the options of the groups, such as the learning rate.
        self.shards.load_state(moments.tensors, state.get("loss_scale"))
        return state

    def _opened(self, folder: Path) -> Weights:
        """Saved weights, or adapters, under the names of the model's parameters, checked."""
        if self.lora is None:
            return fitted(open_weights(folder), self.module)
        weights = open_adapters(str(folder)).weights
        check_names(folder, weights.shapes, self.shards.working)
        return weights


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

    def save(self, tensors: TrainingState, values: dict[str, Any], *, rotate: bool = True) -> Path:
        """Write the checkpoint of ``values["step"]``.

        Args:
            values: JSON values for ``state.json``.
            rotate: remove older checkpoints, as far as ``keep_last`` asks for it.

        Raises:
            ValueError, RuntimeError: on every rank, if writing this checkpoint, or the previous one
                in the background, failed; ValueError for a full disk or missing permissions, and
                before anything is written if a trained weight, an EMA weight or a moment is not
                finite.
        """
        shards = tensors.shards
        state = {
            "format": FORMAT,
            "parameter_groups": shards.groups(),
            **values,
            # Of fp16: a resumed run that began with the first scale again would skip steps.
            "loss_scale": shards.optimizer.loss_scale_state(),
        }
        files = {**tensors.json_files(), "state.json": to_json(state)}

        final = self.run_dir / checkpoint_name(values["step"])
        folder = CheckpointFolder(final, files, **(self._keep if rotate else {}))
        job = SaveJob(folder, tensors.files())
        # The last good checkpoint is worth more than a newer one that cannot be resumed.
        self._check_finite(job, values["step"])
        self._saver.save(job, in_background=self.in_background)
        return final

    def _check_finite(self, job: SaveJob, step: int) -> None:
        """Raise ValueError on every rank unless all that training changes is finite. Collective."""
        names = self._saver.non_finite(job)
        if names:
            raise ValueError(
                f"got NaN or infinity in {', '.join(names[:3])} after step {step}; expected "
                f"numbers, so this checkpoint is not saved; {RESUME}"
            )

    def wait(self) -> None:
        """Wait for a save in the background; raises its error on every rank."""
        self._saver.wait()

    def close(self) -> None:
        """Wait for a save in the background, also when the training failed; raises nothing."""
        self._saver.join()


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of frozen parameters and buffers; training casts the model's own to its precision."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    # Copies, since the cast to bf16 would round them in place.
    tensors = model.state_dict().items()
    return {name: tensor.clone() for name, tensor in tensors if name not in trained}


# The checkpoint to resume from: the newest that is whole and equal on all ranks.
#
# Saves refuse weights that are not finite, so a whole checkpoint is finite. One that contradicts
# its digests is set aside. One that cannot be read now, or is of another format, is passed over
# and stays as it is. Where a checkpoint was once committed and none can be resumed, every start
# raises an error, until the user asks for a start from step 0.


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint of ``--resume auto|none|PATH``; None for ``none`` and a new folder.

    ``auto`` skips checkpoints that are visibly damaged, without reading large files.

    Raises:
        ValueError: if ``auto`` finds no whole checkpoint where there once was one; if PATH is
            neither a committed checkpoint nor a folder that holds one, or it is damaged, or
            ``run_dir`` holds newer ones.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return find_good(run_dir, thorough=False).or_raise(run_dir)

    checkpoint = newest_checkpoint(Path(resume))
    if checkpoint is None:
        reason = "holds no committed checkpoint"
        if not Path(resume).exists():
            reason = f"is not on disk ({describe_missing(resume)})"
        raise ValueError(
            f"got checkpoint path {resume!r}, which {reason}; expected a folder step_... or a "
            "run's folder; check the path"
        )
    _check_newest(checkpoint, run_dir)
    verify(checkpoint, thorough=False)
    return checkpoint


def _check_newest(checkpoint: Path, run_dir: Path) -> None:
    """Raise ValueError if ``run_dir`` holds a checkpoint of a later step."""
    step = checkpoint_step(checkpoint) or 0
    committed = committed_checkpoints(run_dir)
    newer = [folder for folder in committed if (checkpoint_step(folder) or 0) > step]
    if newer:
        raise ValueError(
            f"got --resume {checkpoint} while {run_dir} holds newer checkpoints, up to "
            f"{newer[-1].name}; expected the newest of them; move the newer ones away, or pass "
            "another --cfg-options outputs=..."
        )


@dataclass
class Search:
    """The newest good checkpoint of a run, and the errors of newer ones."""

    checkpoint: Path | None = None
    problems: dict[Path, ValueError] = field(default_factory=dict)

    def or_raise(self, run_dir: Path) -> Path | None:
        """The checkpoint; None in a folder that never had one.

        Raises:
            ValueError: if there once was one, and none is good.
        """
        if self.checkpoint is not None or not had_checkpoints(run_dir):
            return self.checkpoint

        reasons = [f"the newest: {error}" for error in self.problems.values()]
        reason = reasons[0] if reasons else "only its traces are left"
        raise ValueError(
            f"got {run_dir}, which had checkpoints, of which none can be resumed ({reason}); "
            "expected one; restore it, or start from step 0 with --resume none or another "
            "--cfg-options outputs=..."
        )


def find_good(run_dir: Path, *, thorough: bool = True) -> Search:
    """Look for the newest checkpoint that is whole; changes nothing.

    Args:
        thorough: read all of a checkpoint; otherwise see ``verify``.
    """
    search = Search()
    # An older checkpoint costs steps, so the newest that is good is taken.
    for candidate in reversed(committed_checkpoints(run_dir)):
        try:
            verify(candidate, thorough=thorough)
        except ValueError as error:
            search.problems[candidate] = error
        else:
            search.checkpoint = candidate
            break
    return search


def choose_checkpoint(run_dir: Path, checkpoint: Path | None, *, resume: str | None) -> Path | None:
    """The checkpoint to resume from, verified by rank 0 and visible to every rank. Collective.

    With ``resume="auto"``, the newest good one is chosen, and damaged newer ones are set aside.
    With ``"none"``, all that are left are set aside.

    Args:
        checkpoint: what ``find_checkpoint`` returned on this rank.

    Raises:
        ValueError: if ranks see different checkpoints, or none is good; for "none", if one is.
    """
    # Each rank has looked by itself, and file systems may lag behind each other.
    agree_on(checkpoint)
    chosen: list[Path | None] = [checkpoint]
    with on_rank_0("checking a checkpoint") as is_rank_0:
        if is_rank_0 and resume == "auto":
            # Reading all files takes long, so rank 0 does it for all.
            chosen = [_choose_good(run_dir)]
        elif is_rank_0 and resume == "none":
            _set_all_aside(run_dir)
        elif is_rank_0 and checkpoint is not None:
            verify(checkpoint)

    # Rank 0 alone has read the files, and may have chosen an older checkpoint than each rank saw.
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _choose_good(run_dir: Path) -> Path | None:
    """The newest good checkpoint, after damaged newer ones are set aside; see ``Search``."""
    search = find_good(run_dir)
    chosen = search.or_raise(run_dir)
    for candidate, error in search.problems.items():
        # Only what its own digests refuse will never be readable.
        is_damaged = isinstance(error, DamagedCheckpointError)
        action = f"set aside as {set_aside(candidate).name}" if is_damaged else "passed over"
        logger.warning("%s; %s", error, action)
    return chosen


def _set_all_aside(run_dir: Path) -> None:
    """Begin anew in a folder without a good checkpoint; the rest of others is kept."""
    good = find_good(run_dir).checkpoint
    if good is not None:
        raise ValueError(
            f"got --resume none while {good} can be resumed; expected a folder without such a "
            "checkpoint; pass --resume auto or another --cfg-options outputs=..."
        )

    for folder in all_checkpoints(run_dir):
        logger.warning("%s is set aside as %s", folder, set_aside(folder, "previous").name)
    # It would be a trace of checkpoints that can no longer be resumed.
    (run_dir / "latest").unlink(missing_ok=True)


def agree_on(checkpoint: Path | None) -> None:
    """Raise ValueError on every rank unless all of them see the same checkpoint. Collective."""
    # With the digest of COMMIT: folders of one name on disks that are not shared may differ.
    local = (None, None) if checkpoint is None else (checkpoint.name, read_commit(checkpoint))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, local)

    if any(other != seen[0] for other in seen):
        names = [name for name, _ in seen]
        raise ValueError(
            f"got different checkpoints on different ranks ({names}, rank by rank); expected the "
            "same; put the run's folder on a disk that all nodes share"
        )
