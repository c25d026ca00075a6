"""Encoders whose weights are pickled, rewritten as safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from opensora_sp.checkpoint import (
    FileSystem,
    Spec,
    Stored,
    TensorFile,
    new_folder,
    open_weights,
    saved_config,
)
from opensora_sp.checkpoint.pretrained import shard_size_error
from opensora_sp.checkpoint.tensor_file import file_order

# Beginnings of the classes that config.json names, of diffusers, transformers and Open-Sora.
ENCODERS = ("AutoencoderKL", "VideoAutoencoder", "T5", "MT5", "UMT5")


def is_encoder(source: Path) -> bool:
    """True if a folder's ``config.json`` describes a VAE or a T5."""
    config = (saved_config(source) if source.is_dir() else None) or {}
    names = [config.get("_class_name"), *(config.get("architectures") or ())]
    return any(str(name).startswith(ENCODERS) for name in names)


def convert_encoder(
    source: Path, target: Path, *, allow_pickle: bool, max_shard_size: int | str
) -> int:
    """Write an encoder's tensors, unchanged, as safetensors, and copy its other files.

    These are configurations and tokenizers. Encoders check names and shapes when they load.

    Args:
        source: folder with weights in any layout and ``config.json``.
        target: a new or empty folder.
        max_shard_size: of a file, in bytes or as "5GB".

    Returns:
        The number of tensors.

    Raises:
        ValueError: if the weights cannot be read or are pickled and that is not allowed, or the
            target holds something.
    """
    weights = open_weights(source, allow_pickle=allow_pickle)
    assert weights.config is not None
    weights.log()

    with new_folder(target) as folder:
        # As diffusers' and transformers' save_pretrained name them.
        is_of_diffusers = "_class_name" in weights.config
        stem = "diffusion_pytorch_model" if is_of_diffusers else "model"
        _write_tensors(weights.tensors, folder, stem, max_shard_size)

        for file in sorted(source.iterdir()):
            is_index = ".index." in file.name
            if file.suffix in (".json", ".model") and file.is_file() and not is_index:
                shutil.copyfile(file, folder / file.name)
    return len(weights.tensors)


def _write_tensors(
    tensors: dict[str, Stored], folder: Path, stem: str, max_shard_size: int | str
) -> None:
    """Write ``<stem>.safetensors``, or shards and their index, one tensor in memory at a time."""
    specs = {name: Spec.of(stored.read()) for name, stored in tensors.items()}
    try:
        split = split_state_dict_into_shards_factory(
            specs,
            get_storage_size=lambda spec: spec.num_bytes,
            filename_pattern=f"{stem}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise shard_size_error(max_shard_size, error) from None

    filesystem = FileSystem()
    for name, names in split.filename_to_tensors.items():
        file = TensorFile(filesystem, folder / name, {name: specs[name] for name in names})
        for tensor in file_order(file.specs):
            file.append(tensor, [tensors[tensor].read()])
        file.close()

    if split.is_sharded:
        index: dict[str, Any] = {
            "metadata": split.metadata,
            "weight_map": split.tensor_to_filename,
        }
        path = folder / f"{stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1) + "\n")
