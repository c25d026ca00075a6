"""Encoders whose weights are pickled, rewritten as safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

from opensora_sp.checkpoint import new_folder, open_weights, saved_config
from opensora_sp.checkpoint.pretrained import write_shards

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
        # Mapped, so that few of them are in memory; copied where several names share one, of which
        # huggingface_hub would keep a single name.
        tensors, seen = {}, set()
        for name, stored in weights.tensors.items():
            tensor = stored.read()
            storage = tensor.untyped_storage().data_ptr()
            tensors[name] = tensor.clone() if storage in seen else tensor
            seen.add(storage)
        write_shards(tensors, folder, max_shard_size, stem=stem)

        for file in sorted(source.iterdir()):
            is_index = ".index." in file.name
            if file.suffix in (".json", ".model") and file.is_file() and not is_index:
                shutil.copyfile(file, folder / file.name)
    return len(weights.tensors)
