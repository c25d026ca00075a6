"""A pipeline on disk: ``model_index.json`` and a folder for each component with weights.

    model_index.json
    scheduler/scheduler_config.json
    transformer/config.json, model.safetensors
    vae/, text_encoder/        as ``opensora-sp convert`` writes them, with the tokenizer

The options of the encoders (``micro_frame_size``, ``max_length`` and others) are in
``model_index.json``, in the words of a sampling config. Stand-ins without weights have no folder.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import diffusers

from opensora_sp.checkpoint import save_pretrained
from opensora_sp.checkpoint.hub import Kind, describe_missing, local_path
from opensora_sp.checkpoint.pretrained import convert_encoder, new_folder
from opensora_sp.common.files import read_json
from opensora_sp.config.components import check_component, split_type
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.encoders.loading import TOKENIZER_FILES
from opensora_sp.models.base import ConditionedModel

from .scheduler import OpenSoraScheduler

INDEX = "model_index.json"
PIPELINE = "OpenSoraPipeline"
# What a name on the hub must have. Diffusers' own models have the same index, of another class.
ON_HUB = Kind("pipeline", INDEX, ((INDEX,),), (), "")
PARTS = ("scheduler", "transformer", "vae", "text_encoder")
PART_FILES = (
    *("config.json", "*.safetensors", "*.safetensors.index.json"),
    *(*TOKENIZER_FILES, OpenSoraScheduler.config_name),
)
ENCODERS: dict[str, dict[str, Any]] = {"vae": LATENT_ENCODERS, "text_encoder": TEXT_ENCODERS}


@dataclass(frozen=True)
class PipelineFolder:
    """A folder with a pipeline, and the content of its ``model_index.json``."""

    path: Path
    index: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, without: Container[str] = ()) -> PipelineFolder:
        """Read the index in a folder, or of a name on the hub that is not on disk.

        Args:
            without: components whose files are not fetched.

        Raises:
            ValueError: if there is none, or it is of another pipeline.
        """
        parts = [part for part in PARTS if part not in without]
        files = tuple(f"{part}/{file}" for part, file in product(parts, PART_FILES))
        path = local_path(path, kind=ON_HUB, more=files)
        index_path = Path(path, INDEX)
        if not index_path.is_file():
            missing = "" if Path(path).exists() else f" ({describe_missing(path)})"
            raise ValueError(
                f"got {str(path)!r}, which has no {INDEX}{missing}; expected the folder of an "
                f"{PIPELINE}; write one with opensora-sp convert CKPT FOLDER --to diffusers "
                "--config CONFIG, or pass a name on the hub, whose first part is no folder here"
            )

        index = read_json(index_path)
        name = index.get("_class_name") if isinstance(index, dict) else None
        if name != PIPELINE:
            raise ValueError(
                f"got {index_path} of {name!r}; expected {PIPELINE!r}; take that class of "
                "diffusers, or another folder"
            )
        return cls(Path(path), index)

    def scheduler(self) -> OpenSoraScheduler:
        """The scheduler.

        Raises:
            ValueError: if it has no file, or is another one.
        """
        path = self.path / "scheduler" / OpenSoraScheduler.config_name
        config = read_json(path) if path.is_file() else {}
        name = config.get("_class_name") if isinstance(config, dict) else None
        if name != OpenSoraScheduler.__name__:
            raise ValueError(
                f"got {name!r} in {path}; expected {OpenSoraScheduler.__name__!r}; pass the "
                "scheduler itself: from_pretrained(..., scheduler=OpenSoraScheduler(...))"
            )
        return OpenSoraScheduler.from_config(config)

    def encoder_config(self, key: str) -> dict[str, Any]:
        """An encoder as a sampling config describes it, with the folder of its weights.

        Raises:
            ValueError: for a type to import, which data may not name, or options that do not fit.
        """
        config = self.index.get(f"{key}_config")
        if not isinstance(config, dict):
            config = {}
        name, options = split_type(f"{key}_config", config)
        if name not in ENCODERS[key]:
            raise ValueError(
                f"got {key}_config.type {name!r} in {self.path / INDEX}; expected one of "
                f"{sorted(ENCODERS[key])}; pass the object itself: from_pretrained(..., {key}=...)"
            )
        if (self.path / key).is_dir():
            options = {"from_pretrained": str(self.path / key), **options}
        return check_component(key, {"type": name, **options}, ENCODERS[key])


def write_pipeline(
    path: str | Path,
    model: ConditionedModel,
    *,
    vae: Mapping[str, Any],
    text_encoder: Mapping[str, Any],
    scheduler: OpenSoraScheduler,
    allow_pickle: bool = False,
    max_shard_size: int | str = "5GB",
    **card: str | None,
) -> None:
    """Write a pipeline's folder. Encoders are copied as they are stored, and not loaded.

    Args:
        vae, text_encoder: as in a sampling config; ``from_pretrained`` is the folder or the hub's
            name of the weights to copy.
        allow_pickle: also read pickled weights of encoders.
        max_shard_size: of a file, in bytes or as "5GB".
        card: ``license`` and ``base_model`` of the model's card, see ``save_pretrained``.

    Raises:
        ValueError: if the folder holds something, or an encoder cannot be read.
    """
    configs = {"vae": dict(vae), "text_encoder": dict(text_encoder)}
    index: dict[str, Any] = {
        "_class_name": PIPELINE,
        "_diffusers_version": diffusers.__version__,
        "transformer": [type(model).__module__, type(model).__name__],
        "scheduler": [type(scheduler).__module__, type(scheduler).__name__],
    }
    with new_folder(Path(path)) as folder:
        save_pretrained(model, folder / "transformer", max_shard_size=max_shard_size, **card)
        scheduler.save_pretrained(folder / "scheduler")
        for key, config in configs.items():
            cls = ENCODERS[key].get(config["type"])
            index[key] = [None, None] if cls is None else [cls.__module__, cls.__name__]

            source = config.pop("from_pretrained", None)
            if source is not None:
                subfolder = config.pop("subfolder", None) or ""
                convert_encoder(
                    local_path(source, subfolder, allow_pickle=allow_pickle, more=TOKENIZER_FILES),
                    folder / key,
                    allow_pickle=allow_pickle,
                    max_shard_size=max_shard_size,
                )
            index[f"{key}_config"] = config
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
