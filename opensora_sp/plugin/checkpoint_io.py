"""Checkpoint I/O of the Booster: named, whole tensors in safetensors, for any number of processes.

ColossalAI 0.5.0 pickles, names no parameter in optimizer files, saves bf16 weights without their
fp32 master weights, fails on parameters without a gradient and writes in place. Here a model's file
holds the master weights, an optimizer's file ``"exp_avg/<parameter>"`` and the parameter groups,
and files get their names when all of them are complete.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from opensora_sp.checkpoint.checkpoint_folder import to_json
from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.checkpoint.reader import Weights, open_weights
from opensora_sp.checkpoint.state_dict import check_names
from opensora_sp.checkpoint.tensor_file import (
    ShardIndex,
    Spec,
    TensorFile,
    is_index,
    is_safetensors,
)
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver, on_rank_0
from opensora_sp.checkpoint.zero_shards import NamedShards, copy_weights
from opensora_sp.common.files import parse_json, read_json

from ._colossalai import LowLevelZeroCheckpointIO, LowLevelZeroModel, ModelWrapper
from .zero_optimizer import SequenceZeroOptimizer

logger = logging.getLogger(__name__)
# Keys of an optimizer's metadata. The loss scale is null except in fp16.
GROUPS, LOSS_SCALE = "parameter_groups", "loss_scale"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class NamedCheckpointIO(LowLevelZeroCheckpointIO):
    """Checkpoint I/O of ``SequenceParallelPlugin``. Saving and loading is collective.

    Args:
        allow_pickle: ``load_model`` may read pickled weights of other programs; see
            ``open_weights``.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self._saver: Saver | None = None
        super().__init__()

    def wait(self) -> None:
        """Wait for saves with ``use_async=True``; raises their errors on every rank."""
        if self._saver is not None:
            self._saver.wait()

    def _sync_io(self) -> None:
        # ColossalAI calls it before the next save, and at the end.
        self.wait()

    # Models

    def save_unsharded_model(
        self,
        model: ModelWrapper,
        checkpoint: str,
        gather_dtensor: bool,
        use_safetensors: bool,
        use_async: bool = False,
    ) -> None:
        path = _safetensors_path(checkpoint)
        self._save(SaveJob(_Files(path.parent), {path.name: _model_parts(model)}), use_async)

    def save_sharded_model(
        self,
        model: ModelWrapper,
        checkpoint_path: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        max_shard_size: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        stem = f"model.{prefix}" if prefix else "model"
        parts = _model_parts(model)
        self._save(_sharded(Path(checkpoint_path), stem, parts, max_shard_size, {}), use_async)

    @torch.no_grad()
    def load_unsharded_model(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        strict: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.wait()
        if isinstance(model, LowLevelZeroModel):
            model._force_wait_all_gather()

        weights = _open(Path(checkpoint), allow_pickle=self.allow_pickle)
        module = model.unwrap()
        wanted = module.state_dict()
        if not strict:
            wanted = {name: tensor for name, tensor in wanted.items() if name in weights.tensors}
            weights = weights.only(wanted)
        check_names(checkpoint, weights.shapes, wanted)

        copy_weights(weights, module, getattr(model, "shards", None))

    # An index is opened as a file is.
    load_sharded_model = load_unsharded_model

    # Optimizers

    def save_unsharded_optimizer(
        self,
        optimizer: SequenceZeroOptimizer,
        checkpoint: str,
        gather_dtensor: bool = True,
        use_async: bool = False,
    ) -> None:
        shards, path = _shards_of(optimizer), _safetensors_path(checkpoint)
        # The header of a safetensors file holds strings only.
        metadata = {key: json.dumps(entry) for key, entry in _optimizer_values(optimizer).items()}
        target = _Files(path.parent, metadata=metadata)
        self._save(SaveJob(target, {path.name: shards.state_parts()}), use_async)

    def save_sharded_optimizer(
        self,
        optimizer: SequenceZeroOptimizer,
        checkpoint: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        stem = f"optimizer.{prefix}" if prefix else "optimizer"
        parts, values = _shards_of(optimizer).state_parts(), _optimizer_values(optimizer)
        self._save(_sharded(Path(checkpoint), stem, parts, size_per_shard, values), use_async)

    def load_unsharded_optimizer(
        self, optimizer: SequenceZeroOptimizer, checkpoint: str | Path, *args: Any, **kwargs: Any
    ) -> None:
        self.wait()
        source = Path(checkpoint)
        if not is_index(source) and not is_safetensors(source):
            raise ValueError(
                f"got optimizer state {source}, which is no safetensors file; expected what this "
                "plugin's save_optimizer wrote: ColossalAI's own files name no parameters; save "
                "it again"
            )

        shards, state = _shards_of(optimizer), _open(source)
        groups = _metadata(state, GROUPS) or []
        shards.check_state(state, groups)

        shards.load_state(state.tensors, _metadata(state, LOSS_SCALE))
        shards.load_groups(groups)

    load_sharded_optimizer = load_unsharded_optimizer

    # The rest

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write its state as JSON."""
        with on_rank_0("saving an LR scheduler") as is_rank_0:
            if is_rank_0:
                state = lr_scheduler.state_dict()
                # Milestones of MultiStepLR are counted.
                counters = {key: x for key, x in state.items() if isinstance(x, Counter)}
                state |= {key: sorted(x.elements()) for key, x in counters.items()}
                text = json.dumps(state, default=repr)
                # Keys of dicts become texts, other objects their description.
                if parse_json(text, "the state") != state:
                    raise ValueError(
                        f"got a {type(lr_scheduler).__name__} whose state is not JSON: {text}; "
                        "expected numbers, texts and lists; save what it needs yourself"
                    )
                FileSystem().write_file(Path(checkpoint), text.encode())

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        state = read_json(checkpoint)
        for key, entry in state.items():
            if isinstance(vars(lr_scheduler).get(key), Counter):
                state[key] = Counter(entry)
        lr_scheduler.load_state_dict(state)

    def save_lora_as_pretrained(
        self,
        model: ModelWrapper,
        checkpoint: str,
        use_safetensors: bool = False,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """Write peft's folder of the adapters, in the precision of the training.

        ``save_model`` keeps the fp32 master weights.
        """
        with on_rank_0("saving LoRA adapters"):
            super().save_lora_as_pretrained(model, checkpoint, True, state_dict)

    def _save(self, job: SaveJob, use_async: bool) -> None:
        if self._saver is None:
            self._saver = Saver()
        self._saver.save(job, in_background=use_async)


class _Files:
    """Files under partial names, renamed when all are complete; the index is written last."""

    def __init__(
        self,
        folder: Path,
        index: ShardIndex | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.index, self.metadata = folder, index, metadata
        self.filesystem = FileSystem()

    def begin(self) -> None:
        self.filesystem.mkdir(self.folder)

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile:
        path = self.folder / f".partial-{name}"
        return TensorFile(self.filesystem, path, specs, self.metadata)

    def abandon(self) -> None:
        for path in self.folder.glob(".partial-*"):
            self.filesystem.unlink(path)

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None:
        for name in entries:
            self.filesystem.rename(self.folder / f".partial-{name}", self.folder / name)
        self.filesystem.flush(self.folder)

        if self.index is not None:
            digests = {name: entry["sha256"] for name, entry in entries.items()}
            metadata = {**self.index.metadata, "sha256": digests}
            content = to_json({"metadata": metadata, "weight_map": self.index.weight_map})
            self.filesystem.write_file(self.index.path, content)


def _model_parts(model: ModelWrapper) -> dict[str, Part]:
    """The weights: fp32 master weights where there are some, else the model's own tensors."""
    if isinstance(model, LowLevelZeroModel):
        model._force_wait_all_gather()

    module, shards = model.unwrap(), getattr(model, "shards", None)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parts = {}
    for name, tensor in module.state_dict().items():
        if shards is not None and name in shards.master_weights:
            parts[name] = shards.part(name, shards.master_weights[name])
        else:
            parts[name] = Part.whole(tensor, constant=name in frozen)
    return parts


def _shards_of(optimizer: Any) -> NamedShards:
    shards: NamedShards | None = getattr(optimizer, "shards", None)
    if shards is None:
        raise ValueError(
            f"got a {type(optimizer).__name__} that was not boosted by SequenceParallelPlugin; "
            "expected the optimizer that Booster.boost returned; boost it first"
        )
    return shards


def _sharded(
    folder: Path, stem: str, parts: dict[str, Part], megabytes: int, metadata: dict[str, Any]
) -> SaveJob:
    """Files of at most so many MB, ``<stem>-00001-of-00003.safetensors``, ..., and their index."""
    split = split_state_dict_into_shards_factory(
        parts,
        get_storage_size=lambda part: part.spec.num_bytes,
        filename_pattern="{suffix}",
        max_shard_size=megabytes * 1024**2,
    )

    shards = split.filename_to_tensors.values()
    files: dict[str, dict[str, Part]] = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        files[file] = {name: parts[name] for name in names}
        weight_map |= dict.fromkeys(names, file)

    path = folder / f"{stem}.safetensors.index.json"
    index = ShardIndex(path, weight_map, {**metadata, **split.metadata})
    return SaveJob(_Files(folder, index), files)


def _open(source: Path, *, allow_pickle: bool = False) -> Weights:
    """Open a file, or an index whose SHA-256 rank 0 has compared with its shards. Collective."""
    if is_index(source):
        index = ShardIndex.read(source)
        with on_rank_0("checking a checkpoint") as is_rank_0:
            if is_rank_0:
                index.verify()

        # An optimizer has no state before its first step.
        if not index.weight_map:
            return Weights(source, "no shards", None, {}, metadata=index.metadata)
    return open_weights(source, allow_pickle=allow_pickle)


def _optimizer_values(optimizer: SequenceZeroOptimizer) -> dict[str, Any]:
    """The saved state of an optimizer without its tensors, as JSON values."""
    return {GROUPS: optimizer.shards.groups(), LOSS_SCALE: optimizer.loss_scale_state()}


def _metadata(state: Weights, key: str) -> Any:
    """A value of ``_optimizer_values``. The header of a file holds them as strings of JSON."""
    entry = state.metadata.get(key)
    return parse_json(entry, f"{key} of {state.path}") if isinstance(entry, str) else entry


def _safetensors_path(checkpoint: str) -> Path:
    path = Path(checkpoint)
    if path.suffix in PICKLED:
        raise ValueError(
            f"got checkpoint {checkpoint!r}, whose name says that it is pickled; expected a name "
            f"such as {path.with_suffix('.safetensors').name!r}, since this plugin writes "
            "safetensors; change the name"
        )
    return path
