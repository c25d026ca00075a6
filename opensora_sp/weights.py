"""Weights on disk, and whether they fit: folders of ``config.json`` and ``model.safetensors``, checkpoints of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{8,})")
_MAY_DIFFER = {"class_dropout_prob", "drop_path"}  # rates of the training run; the weights do not depend on them


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint written after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def committed_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run that were written to the end, oldest first."""
    if not run_dir.is_dir():
        return []
    found = [p for p in run_dir.iterdir() if _NAME.fullmatch(p.name) and (p / "COMMIT").is_file()]
    return sorted(found, key=lambda p: int(p.name.split("_")[1]))


def newest_checkpoint(place: Path) -> Path | None:
    """``place`` itself if it is a committed checkpoint, else the newest one in it, else None."""
    if (place / "COMMIT").is_file():
        return place
    return next(reversed(committed_checkpoints(place)), None)


def model_config_json(name: str, config: Any) -> bytes:
    """The content of ``config.json`` beside the weights."""
    return (json.dumps({"_class_name": name, **dataclasses.asdict(config)}, indent=1) + "\n").encode()


def write_model_config(folder: Path, name: str, config: Any) -> None:
    """Write ``config.json`` beside the weights."""
    (folder / "config.json").write_bytes(model_config_json(name, config))


def check_model_config(folder: Path, name: str, config: Any) -> None:
    """Raise ValueError if the weights in ``folder`` are said to be of a model of another class or configuration.

    Keys that this package does not know are ignored, and keys that the file lacks have their default; names and shapes
    of the tensors are checked when they are loaded.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"got {folder} without config.json; expected the model's configuration; check the path")
    saved = json.loads((folder / "config.json").read_text())
    defaults = json.loads(json.dumps(dataclasses.asdict(type(config)())))
    ours = {"_class_name": name, **json.loads(json.dumps(dataclasses.asdict(config)))}
    theirs = {"_class_name": name, **defaults, **saved}
    differing = [key for key in ours if key not in _MAY_DIFFER and theirs[key] != ours[key]]
    if differing:
        shown = ", ".join(f"{key} is {theirs[key]!r} there, {ours[key]!r} here" for key in differing[:4])
        raise ValueError(
            f"got checkpoint {folder} of another model ({shown}); expected one of the configured model; "
            "change the checkpoint or the config's model"
        )


def check_names(folder: Path, found: dict[str, tuple[int, ...]], wanted: dict[str, Any], *, exact: bool) -> None:
    """Raise ValueError unless every tensor of ``wanted`` is found in its shape (and, if exact, nothing else)."""
    differences = [f"missing {name}" for name in wanted if name not in found]
    differences += [
        f"{name} is {list(found[name])}, not {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and tuple(found[name]) != tuple(tensor.shape)
    ]
    if exact:
        differences += [f"unexpected {name}" for name in found if name not in wanted]
    if differences:
        raise ValueError(
            f"got weights of another model in {folder} ({len(differences)} differences: {', '.join(differences[:4])}); "
            "expected those of the configured model; change the checkpoint or the config's model"
        )


def check_encoders(model_config: Any, vae: Any, text_encoder: Any) -> None:
    """Raise ValueError if the encoders do not produce what the model takes."""
    pairs = [
        ("latent channels", "vae", vae.channels, "in_channels", model_config.in_channels),
        ("text features", "text_encoder", text_encoder.width, "caption_channels", model_config.caption_channels),
    ]
    for what, encoder, given, key, taken in pairs:
        if given != taken:
            raise ValueError(
                f"got {given} {what} from {encoder} and model.{key} = {taken}; expected them to agree; "
                f"set model.{key}={given} or choose another {encoder}"
            )
    if text_encoder.max_length > model_config.model_max_length:
        raise ValueError(
            f"got text_encoder.max_length {text_encoder.max_length} over model.model_max_length "
            f"{model_config.model_max_length}; expected at most that; lower the one or raise the other"
        )
