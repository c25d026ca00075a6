"""Models from weights on disk and back, in the layout of the Hugging Face hub."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.registry import model_class

from .adapters import check_adapters, merged, open_adapters, warn_of_other_base
from .filesystem import FileSystem
from .model_config import choose_config, write_model_config
from .reader import Weights, open_weights, saved_config
from .state_dict import check_conversions, fitted

CARD = "README.md"
CARD_TEXT = """---
library_name: opensora_sp
pipeline_tag: text-to-video
license: {license!r}
{base_model}---

# {name}

{name} with {millions:.1f} M parameters in {dtype}, exported by `opensora_sp`. License: {license}.
Weights made of others are under the license of the others.

Load it by `opensora_sp.checkpoint.from_pretrained("{folder}")`, or sample with a config that has
the autoencoder, the text encoder and the scheduler that it was trained with:

```bash
torchrun --nproc_per_node 2 scripts/inference.py CONFIG --ckpt {folder} --prompt "a red fox"
```
"""


def from_pretrained(
    path: str | Path,
    *,
    revision: str | None = None,
    model: str | None = None,
    allow_pickle: bool = False,
    strict: bool = True,
    ema: bool = False,
    convert: Collection[str] = (),
    lora: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    **config: Any,
) -> ConditionedModel:
    """Build a model from weights in any layout: Hugging Face folder, file, Booster folder, our run.

    Args:
        path: a file or folder, or a name on the Hugging Face hub; see ``find_weights``.
        revision: branch, tag or commit of a name on the hub, as in "owner/name@revision".
        model: class or preset, required without a ``config.json``; otherwise it must agree
            with that.
        allow_pickle: also read pickled files, of which no code is run, see
            ``opensora_sp.checkpoint.pickle_file``.
        strict: refuse missing, unexpected and reshaped tensors. Otherwise those are skipped with
            a warning, and the model keeps its random ones. Weights of a class that ``model`` is
            derived from are accepted without ``lora``, and what it adds keeps its initialization.
        ema: load the EMA weights where there are both.
        convert: conversions to apply, some of ``CONVERSIONS``.
        lora: LoRA adapters to merge into the weights, each ``PATH`` or ``PATH:SCALE``; see
            ``opensora_sp.checkpoint.adapters``.
        dtype: of the result, by default as stored. Rotary frequencies are not rounded.
        config: settings that replace values of ``config.json`` or of the preset.

    Returns:
        The model on the CPU, in memory that it shares with no file.

    Raises:
        ValueError: if weights or adapters cannot be read, or belong to another model, with all
            differences.
    """
    if "pred_sigma" in check_conversions(convert):
        config = {"pred_sigma": False, **config}

    source = path if revision is None else f"{path}@{revision}"
    weights = open_weights(source, ema=ema, allow_pickle=allow_pickle)
    name, settings, notes = choose_config(
        weights.path, weights.config, model, config, num_tensors=len(weights.tensors)
    )
    weights = replace(weights, notes=(*weights.notes, *notes))

    # Names and shapes are compared before memory is allocated.
    with torch.device("meta"):
        built = model_class(name)(settings)
    weights = fitted(weights, built, convert=convert, strict=strict, allow_base=not lora)

    adapters = [open_adapters(source, ema=ema) for source in lora]
    for source_adapters in adapters:
        check_adapters(source_adapters, built)
    warn_of_other_base(weights, adapters)
    weights = merged(weights, adapters)

    if len(weights.tensors) < len(built.state_dict()):
        # The weights lack some: draw these at random.
        built = model_class(name)(settings)
    return fill(built, weights).to(dtype=dtype)


def fill(model: ConditionedModel, weights: Weights) -> ConditionedModel:
    """Assign fitted weights to a model, which may be on the meta device.

    The model gets copies, in the dtype of the weights.
    """
    weights.log()
    # Clones: mapped tensors would change or fail with their file.
    state = {name: stored.read().clone() for name, stored in weights.tensors.items()}
    model.load_state_dict(state, strict=False, assign=True)

    assert not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
    return model


def save_pretrained(
    model: ConditionedModel,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    license: str | None = None,
    base_model: str | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` or shards and their index, and a model card.

    The folder is written under a partial name next to it and renamed when complete. Under a
    launcher, call this on one rank, with whole parameters.

    Args:
        model: a bare model, or one wrapped for sequence parallelism.
        path: a new or empty folder.
        max_shard_size: largest file, in bytes or as "5GB"; a larger tensor gets a file to itself.
        license: of the weights, as the hub names it, such as "apache-2.0"; None if not known.
        base_model: the name on the hub of the model that they were made of.

    Raises:
        ValueError: if the folder holds something, or the size is none.
    """
    name = type(model).__name__
    card = CARD_TEXT.format(
        license=license or "unknown",
        base_model=f"base_model: {base_model!r}\n" if base_model else "",
        name=name,
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        dtype=str(model.dtype).removeprefix("torch."),
        folder=Path(path).name,
    )
    with new_folder(Path(path)) as folder:
        write_shards(model.state_dict(), folder, max_shard_size)
        write_model_config(folder, name, model.config)
        (folder / CARD).write_text(card, encoding="utf-8")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write files to, which gets its name when they are complete and flushed.

    Raises:
        ValueError: if there is something of that name.
    """
    check_vacant(final)
    filesystem = FileSystem()
    partial = final.parent / f".partial-{final.name}"
    # Left by an attempt that was killed.
    shutil.rmtree(partial, ignore_errors=True)
    filesystem.mkdir(partial)

    try:
        yield partial
        for file in partial.iterdir():
            filesystem.flush(file)

        filesystem.flush(partial)
        filesystem.rename(partial, final)
        filesystem.flush(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_shards(
    tensors: dict[str, Tensor], folder: Path, max_shard_size: int | str, *, stem: str = "model"
) -> None:
    """Write ``<stem>.safetensors``, or shards and their index.

    Raises:
        ValueError: for a size that huggingface_hub refuses.
    """
    from huggingface_hub import save_torch_state_dict

    pattern = f"{stem}{{suffix}}.safetensors"
    try:
        save_torch_state_dict(
            tensors, folder, filename_pattern=pattern, max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ValueError(
            f"got max_shard_size {max_shard_size!r} ({error}); expected bytes or a size such as "
            "'5GB'; change it"
        ) from None
    for file in folder.iterdir():
        # safetensors creates files that only their owner may read.
        file.chmod(folder.stat().st_mode & 0o666)


def check_vacant(folder: Path) -> None:
    """Raise ValueError unless a folder for weights is new or empty."""
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty:
        raise ValueError(
            f"got {folder} to write to, which is there already; expected a new folder; choose "
            "another name"
        )


# Encoders whose weights are pickled, rewritten as safetensors

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
