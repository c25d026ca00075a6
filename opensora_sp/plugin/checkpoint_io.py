"""What ``Booster.save_*`` and ``load_*`` do: named, whole tensors in safetensors, for any number of processes.

ColossalAI 0.5.0 pickles, names no parameter in optimizer files, saves bf16 weights without their fp32 masters, fails
on parameters without a gradient and writes in place. Here a model's file holds the masters, an optimizer's file
``"exp_avg/<parameter>"`` and the parameter groups, and files get their names when they are whole.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from opensora_sp.checkpoint import (
    Disk,
    Part,
    SaveJob,
    Saver,
    Spec,
    TensorFile,
    check_names,
    on_rank_0,
    open_weights,
)
from opensora_sp.checkpoint.folder import inside, sha256, to_json
from opensora_sp.checkpoint.reader import Stored

from ._colossalai import LowLevelZeroCheckpointIO, LowLevelZeroModel, ModelWrapper
from .optimizer import NamedShards, SequenceZeroOptimizer

logger = logging.getLogger(__name__)
GROUPS, LOSS_SCALE = "parameter_groups", "loss_scale"  # the latter null but in fp16
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class NamedCheckpointIO(LowLevelZeroCheckpointIO):
    """Checkpoint I/O of ``SequenceParallelPlugin``. Saving and loading is collective.

    Args:
        allow_pickle: ``load_model`` may read pickled weights of other programs, only from a source that you trust; see
            ``open_weights``.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle, self._saver, self._warned = allow_pickle, None, False
        super().__init__()

    _saver: Saver | None

    def wait(self) -> None:
        """Until what was saved with ``use_async=True`` is on disk; raises on every rank what went wrong."""
        if self._saver is not None:
            self._saver.wait()

    def _sync_io(self) -> None:  # ColossalAI calls it before the next save, and at the end
        self.wait()

    def save_unsharded_model(
        self,
        model: ModelWrapper,
        checkpoint: str,
        gather_dtensor: bool,
        use_safetensors: bool,
        use_async: bool = False,
    ) -> None:
        self._say_safetensors(use_safetensors)
        path = _named_safely(checkpoint)
        self._save(_Files(path.parent), {path.name: _model_parts(model)}, use_async)

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
        self._say_safetensors(use_safetensors)
        stem = f"model.{prefix}" if prefix else "model"
        files = _split(_model_parts(model), stem, max_shard_size)
        self._save(
            _Files(Path(checkpoint_path), _Index(f"{stem}.safetensors", files)), files, use_async
        )

    def save_unsharded_optimizer(
        self,
        optimizer: SequenceZeroOptimizer,
        checkpoint: str,
        gather_dtensor: bool = True,
        use_async: bool = False,
    ) -> None:
        shards, path = _shards_of(optimizer), _named_safely(checkpoint)
        metadata = {key: json.dumps(value) for key, value in _about(optimizer).items()}
        self._save(
            _Files(path.parent, metadata=metadata), {path.name: shards.state_parts()}, use_async
        )

    def save_sharded_optimizer(
        self,
        optimizer: SequenceZeroOptimizer,
        checkpoint: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        shards, stem = _shards_of(optimizer), f"optimizer.{prefix}" if prefix else "optimizer"
        files = _split(shards.state_parts(), stem, size_per_shard)
        index = _Index(f"{stem}.safetensors", files, _about(optimizer))
        self._save(_Files(Path(checkpoint), index), files, use_async)

    def load_unsharded_model(
        self, model: ModelWrapper, checkpoint: str, strict: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        self._load_model(model, Path(checkpoint), [Path(checkpoint)], strict)

    def load_sharded_model(
        self,
        model: ModelWrapper,
        checkpoint_index_file: Path,
        strict: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        index = Path(checkpoint_index_file)
        self._load_model(model, index, _checked_files(index)[0], strict)

    def load_unsharded_optimizer(
        self, optimizer: SequenceZeroOptimizer, checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        self.wait()
        path = Path(checkpoint)
        if not _is_safetensors(path):
            raise ValueError(
                f"got optimizer state {checkpoint}, which is no safetensors file; expected what this plugin's "
                "save_optimizer wrote: ColossalAI's own files name no parameters; save it again"
            )
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        about = {key: json.loads(metadata[key]) for key in (GROUPS, LOSS_SCALE) if key in metadata}
        _load_optimizer(_shards_of(optimizer), path, [path], about)

    def load_sharded_optimizer(
        self,
        optimizer: SequenceZeroOptimizer,
        index_file_path: str,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.wait()
        files, metadata = _checked_files(Path(index_file_path))
        _load_optimizer(_shards_of(optimizer), Path(index_file_path), files, metadata)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """As JSON."""
        with on_rank_0("saving an LR scheduler") as writer:
            if writer:
                try:
                    text = to_json(_keyed(lr_scheduler.state_dict()))
                except TypeError as error:
                    raise ValueError(
                        f"got a {type(lr_scheduler).__name__} whose state is not JSON ({error}); expected numbers, "
                        "texts and lists; save what it needs yourself"
                    ) from None
                Disk().write_file(Path(checkpoint), text)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        state = json.loads(Path(checkpoint).read_text(), object_hook=_unkeyed)
        for key, value in state.items():
            if isinstance(vars(lr_scheduler).get(key), Counter):  # milestones
                state[key] = Counter(value)
        lr_scheduler.load_state_dict(state)

    def save_lora_as_pretrained(
        self,
        model: ModelWrapper,
        checkpoint: str,
        use_safetensors: bool = False,
        state_dict: dict[str, Any] | None = None,
    ) -> None:
        """peft's folder of the adapters, in the precision of the training; ``save_model`` keeps fp32 masters."""
        self._say_safetensors(use_safetensors)
        with on_rank_0("saving LoRA adapters"):
            super().save_lora_as_pretrained(model, checkpoint, True, state_dict)

    def _save(self, target: _Files, files: dict[str, dict[str, Part]], use_async: bool) -> None:
        if self._saver is None:
            self._saver = Saver()
        self._saver.save(SaveJob(target, files), in_background=use_async)

    def _say_safetensors(self, use_safetensors: bool) -> None:
        if not use_safetensors and not self._warned and dist.get_rank() == 0:
            self._warned = True
            warnings.warn(
                "weights are saved in safetensors: this plugin pickles nothing", stacklevel=4
            )

    @torch.no_grad()
    def _load_model(
        self, model: ModelWrapper, source: Path, files: list[Path], strict: bool
    ) -> None:
        self.wait()
        if isinstance(model, LowLevelZeroModel):
            model._force_wait_all_gather()
        own, shards = model.unwrap().state_dict(), getattr(model, "shards", None)
        tensors = _opened(files, allow_pickle=self.allow_pickle)
        shapes = {name: stored.shape for name, stored in tensors.items()}
        wanted = own if strict else {name: tensor for name, tensor in own.items() if name in shapes}
        check_names(source, shapes, wanted, exact=strict)
        for name, stored in tensors.items():
            if shards is not None and name in shards.master_weights:
                shards.set_weight(name, stored.read())
            elif name in own:
                own[name].copy_(stored.read())


def _opened(files: list[Path], *, allow_pickle: bool = False) -> dict[str, Stored]:
    """The tensors of all files by name, none of them read yet."""
    return {
        n: t
        for path in files
        for n, t in open_weights(path, allow_pickle=allow_pickle).tensors.items()
    }


class _Index:
    """``<name>.index.json`` in the Hugging Face layout, with the SHA-256 of each file besides."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, Mapping[str, Part]],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = f"{name}.index.json"
        self.metadata = dict(metadata or {})
        self.metadata["total_size"] = sum(
            part.spec.num_bytes for parts in files.values() for part in parts.values()
        )
        self.weight_map = {name: file for file, parts in files.items() for name in parts}

    def text(self, entries: Mapping[str, dict[str, Any]]) -> bytes:
        digests = {name: entry["sha256"] for name, entry in entries.items()}
        return to_json(
            {"metadata": {**self.metadata, "sha256": digests}, "weight_map": self.weight_map}
        )


class _Files:
    """Files under partial names, which become the right ones when all of them are whole; the index comes last."""

    def __init__(
        self, folder: Path, index: _Index | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.index, self.metadata, self.disk = folder, index, metadata, Disk()

    def begin(self) -> None:
        self.disk.mkdir(self.folder)

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile:
        return TensorFile(self.disk, self.folder / f".partial-{name}", specs, self.metadata)

    def abandon(self) -> None:
        for path in self.folder.glob(".partial-*"):
            self.disk.unlink(path)

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None:
        if self.index is not None:
            self._remove_old(self.folder / self.index.name)
        for name in entries:
            self.disk.rename(self.folder / f".partial-{name}", self.folder / name)
        self.disk.flush(self.folder)
        if self.index is not None:
            self.disk.write_file(self.folder / self.index.name, self.index.text(entries))

    def _remove_old(self, index: Path) -> None:
        """What an earlier save has left; without its index nobody takes old files for a part of the new ones."""
        if index.is_file():
            old = set(json.loads(index.read_text())["weight_map"].values())
            self.disk.unlink(index)
            self.disk.flush(self.folder)
            for file in (inside(self.folder, name) for name in sorted(old)):
                if file.is_file():
                    self.disk.unlink(file)


def _model_parts(model: ModelWrapper) -> dict[str, Part]:
    """The weights: fp32 masters where there are some, the model's own tensors otherwise."""
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
            f"got a {type(optimizer).__name__} that was not boosted by SequenceParallelPlugin; expected the optimizer "
            "that Booster.boost returned; boost it first"
        )
    return shards


def _split(parts: dict[str, Part], stem: str, megabytes: int) -> dict[str, dict[str, Part]]:
    """Files of at most so many MB, or of one tensor: ``<stem>-00001-of-00003.safetensors``, ..."""
    groups: list[dict[str, Part]] = [{}]
    size = 0
    for name, part in parts.items():
        if groups[-1] and size + part.spec.num_bytes > megabytes * 1024**2:
            groups.append({})
            size = 0
        groups[-1][name] = part
        size += part.spec.num_bytes
    return {
        f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }


def _checked_files(index: Path) -> tuple[list[Path], dict[str, Any]]:
    """The files that an index lists, and its metadata. Rank 0 compares their SHA-256 where the index has it."""
    content = json.loads(index.read_text())
    metadata, files = content.get("metadata", {}), sorted(set(content["weight_map"].values()))
    paths = [inside(index.parent, name) for name in files]
    with on_rank_0("checking a checkpoint") as checker:
        if checker:
            for name, path in zip(files, paths, strict=True):
                wanted = metadata.get("sha256", {}).get(name)
                if not path.is_file() or (wanted is not None and sha256(path) != wanted):
                    raise ValueError(
                        f"got a damaged checkpoint: {path} is not the file that {index.name} lists; expected the files "
                        "as they were saved; load another checkpoint"
                    )
    return paths, metadata


def _about(optimizer: SequenceZeroOptimizer) -> dict[str, Any]:
    """What is saved of an optimizer beside its tensors, as JSON values."""
    return {GROUPS: optimizer.shards.groups(), LOSS_SCALE: optimizer.loss_scale_state()}


def _load_optimizer(
    shards: NamedShards, source: Path, files: list[Path], about: dict[str, Any]
) -> None:
    """Check names, shapes and groups; then replace the state of every parameter and what the groups say."""
    groups = about.get(GROUPS, [])
    shards.check_groups(groups, source)
    tensors = _opened(files)
    shards.check_states({name: stored.shape for name, stored in tensors.items()}, source)
    found: dict[str, dict[str, Stored]] = {name: {} for name in shards.working}
    for key, stored in tensors.items():
        kind, _, name = key.partition("/")
        found[name][kind] = stored
    for name, state in found.items():
        shards.set_state(name, {kind: stored.read() for kind, stored in state.items()})
    for group, saved in zip(shards.optimizer.param_groups, groups, strict=True):
        for key in saved.keys() & group.keys():
            group[key] = tuple(saved[key]) if isinstance(group[key], tuple) else saved[key]
    shards.optimizer.set_loss_scale_state(about.get(LOSS_SCALE))


def _named_safely(checkpoint: str) -> Path:
    path = Path(checkpoint)
    if path.suffix in PICKLED:
        raise ValueError(
            f"got checkpoint {checkpoint!r}, whose name says that it is pickled; expected a name such as "
            f"{path.with_suffix('.safetensors').name!r}, since this plugin writes safetensors; change the name"
        )
    return path


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _keyed(value: Any) -> Any:
    """JSON has texts as keys only: other dicts become lists of pairs."""
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {"__pairs__": [[key, _keyed(item)] for key, item in value.items()]}
    if isinstance(value, dict):
        return {key: _keyed(item) for key, item in value.items()}
    return value


def _unkeyed(value: dict[str, Any]) -> dict[Any, Any]:
    return dict(value["__pairs__"]) if set(value) == {"__pairs__"} else value
