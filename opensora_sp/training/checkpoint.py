"""Checkpoints that do not depend on the processes that wrote them.

A checkpoint is a folder ``step_00001000`` of whole, named tensors and JSON; nothing in it is pickled::

    model/config.json  model/model.safetensors     fp32 weights
    ema/config.json    ema/model.safetensors       their moving average
    optimizer.safetensors                          "exp_avg/<parameter>", ...
    state.json                                     step and what else a run needs to go on
    manifest.json                                  size and SHA-256 of every file above
    COMMIT                                         written last: without it the folder is not a checkpoint

It is written under a temporary name by rank 0 and renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora_sp.models.conditioning import ConditionedModel
from opensora_sp.weights import (
    Weights,
    checkpoint_name,
    committed_checkpoints,
    fitted,
    flush,
    newest_checkpoint,
    open_weights,
    write_model_config,
)

from .ema import ShardedEma

if TYPE_CHECKING:
    from opensora_sp.plugin import NamedShards

FORMAT = 1


def save_checkpoint(
    run_dir: Path,
    state: dict[str, Any],
    module: nn.Module,
    fixed: dict[str, Tensor],
    shards: NamedShards,
    ema: ShardedEma,
    *,
    keep_last: int | None,
) -> Path:
    """Write the checkpoint of ``state["step"]``. Collective; an error of the writer is raised on every rank.

    Args:
        run_dir: folder that holds the run's checkpoints.
        state: JSON values for ``state.json``, with the step.
        module: the bare model, for its configuration.
        fixed: its frozen parameters and buffers, before they were cast to the training's precision.
        shards, ema: where trainable weights, optimizer state and averages come from.
        keep_last: remove older checkpoints beyond this many.
    """
    final = run_dir / checkpoint_name(state["step"])
    weights = dict(shards.gather_all(shards.masters))
    averages = dict(shards.gather_all(ema.shards))
    moments = dict(_gather_moments(shards))
    with on_rank_0("saving a checkpoint") as writer:
        if writer:
            partial = run_dir / f".partial-{final.name}"
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)
            (partial / "ema").mkdir()
            save_file({**fixed, **weights}, partial / "model" / "model.safetensors")
            save_file({**fixed, **averages}, partial / "ema" / "model.safetensors")
            save_file(moments, partial / "optimizer.safetensors")
            for part in ("model", "ema"):
                write_model_config(partial / part, type(module).__name__, module.config)
            _write_json(partial / "state.json", {"format": FORMAT, **state})
            _commit(partial, final)
            for old in committed_checkpoints(run_dir)[: -keep_last or None] if keep_last else []:
                shutil.rmtree(old)
    return final


def load_checkpoint(
    folder: Path, module: ConditionedModel, fixed: dict[str, Tensor], shards: NamedShards, ema: ShardedEma
) -> dict[str, Any]:
    """Put a checkpoint's weights, averages and optimizer state into this run's shards; returns ``state.json``.

    Raises:
        ValueError: if a file is damaged, or parameter names or shapes are those of another model.
    """
    with on_rank_0("checking a checkpoint") as checker:
        if checker:
            verify(folder)
    load_model(open_weights(folder / "model"), module, fixed, shards)
    averages = fitted(open_weights(folder / "ema"), module)
    for name, shard in ema.shards.items():
        shard.copy_(shards.cut(name, averages.tensors[name].read()))
    with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
        found: dict[str, dict[str, Tensor]] = {}
        for key in file.keys():
            kind, name = key.split("/", 1)
            found.setdefault(name, {})[kind] = file.get_tensor(key)
    for name, moments in found.items():
        shards.set_state(name, moments)
    return json.loads((folder / "state.json").read_text())


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
        if name in shards.masters:
            shards.set_weight(name, whole)
        else:
            fixed[name] = whole.to(fixed[name].dtype, copy=True)
            tensors[name].copy_(whole)


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that ``--resume auto|PATH`` means; None if ``auto`` finds none.

    Raises:
        ValueError: if PATH is neither a committed checkpoint nor a folder that holds one.
    """
    found = newest_checkpoint(run_dir if resume == "auto" else Path(resume))
    if found is None and resume != "auto":
        raise ValueError(
            f"got checkpoint path {resume!r}, which holds no committed checkpoint; expected a folder step_... or a "
            "run's folder; check the path"
        )
    return found


def verify(folder: Path) -> None:
    """Raise ValueError unless every file has the size and SHA-256 that the manifest says."""
    for name, entry in json.loads((folder / "manifest.json").read_text()).items():
        file = folder / name
        found = {"bytes": file.stat().st_size, "sha256": _sha256(file)} if file.is_file() else "no such file"
        if found != entry:
            raise ValueError(
                f"got a damaged checkpoint: {file} has {found}; expected {entry}; resume from another checkpoint"
            )


class on_rank_0:  # noqa: N801  (used like a function)
    """``with on_rank_0(what) as here:`` runs rank 0's part; its error is raised on every rank, so that none hangs."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> bool:
        return dist.get_rank() == 0

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        told: list[Any] = [None if error is None else (isinstance(error, ValueError), f"{error}")]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None and error is None:
            is_user_error, text = told[0]
            raise (ValueError(text) if is_user_error else RuntimeError(f"rank 0 failed {self.what}: {text}"))


def _gather_moments(shards: NamedShards) -> Iterator[tuple[str, Tensor]]:
    for name, state in shards.states().items():
        for kind, value in state.items():
            if isinstance(value, int):  # as HybridAdam counts its steps
                value = torch.tensor(value)
            if value.ndim == 0:
                yield f"{kind}/{name}", value.cpu().clone()
            elif (whole := shards.gather(name, value)) is not None:
                yield f"{kind}/{name}", whole


def _commit(partial: Path, final: Path) -> None:
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    _write_json(partial / "manifest.json", manifest)
    for path in (*files, partial / "manifest.json", *(p for p in partial.rglob("*") if p.is_dir()), partial):
        flush(path)
    if final.exists():  # the leftover of a run that was cut off, or an equal checkpoint written again
        shutil.rmtree(final)
    os.replace(partial, final)
    (final / "COMMIT").write_text(f"{FORMAT}\n")
    flush(final / "COMMIT")
    flush(final)
    flush(final.parent)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
