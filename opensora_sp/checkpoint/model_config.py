"""``config.json`` beside weights: ours, and those of the public Open-Sora checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from opensora_sp.models.registry import CLASSES, PRESETS, model_class, resolve_config

from .reader import saved_config
from .state_dict import CONVERSIONS

MAY_DIFFER = frozenset(
    {"class_dropout_prob", "drop_path", "attention"}
)  # of one run, not of the weights
# Said by transformers about the file, or by Open-Sora about how it runs or trains; none changes what is computed.
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version",
        "enable_flash_attn", "enable_flashattn", "enable_layernorm_kernel", "enable_sequence_parallelism",
        "force_huggingface", "freeze", "freeze_y_embedder", "from_pretrained", "input_size", "only_train_temporal",
    }
)  # fmt: skip
MUST_BE = {
    "no_temporal_pos_emb": False,
    "skip_temporal": False,
}  # what these would change is not built here


def model_config_json(name: str, config: Any) -> bytes:
    """The content of ``config.json`` beside the weights."""
    return (
        json.dumps({"_class_name": name, **dataclasses.asdict(config)}, indent=1) + "\n"
    ).encode()


def write_model_config(folder: Path, name: str, config: Any) -> None:
    """Write ``config.json`` beside the weights."""
    (folder / "config.json").write_bytes(model_config_json(name, config))


def understood(saved: dict[str, Any], place: Path) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The model's class, what the file says of its configuration, and notes on what was left out or filled in.

    Raises:
        ValueError: if it is of another kind of model, or says something that may change what the model computes.
    """
    said = [saved.get("_class_name"), *(saved.get("architectures") or ()), saved.get("model_type")]
    name = next((one for one in said if one in CLASSES), None)
    if name is None:
        kinds = [one for one in said if one] or "no model"
        raise ValueError(
            f"got {place} with a config.json of {kinds}; expected one of {list(CLASSES)} under _class_name, "
            "architectures or model_type; check the path, or correct the file"
        )
    known = {field.name for field in dataclasses.fields(CLASSES[name].Config)}
    values = {key: value for key, value in saved.items() if key in known}
    others = {
        key: value for key, value in saved.items() if key not in known and key != "_class_name"
    }
    strange = {
        k: v
        for k, v in others.items()
        if k not in WITHOUT_EFFECT and not (k in MUST_BE and MUST_BE[k] == v)
    }
    if strange:
        shown = ", ".join(f"{key} = {value!r}" for key, value in list(strange.items())[:6])
        raise ValueError(
            f"got {place} with {shown} in config.json; expected settings of {name} ({', '.join(sorted(known))}); what "
            "others mean for the weights is not known: take them out if they change nothing"
        )
    notes = [f"config.json: left out {', '.join(sorted(others))}"] if others else []
    if (
        name == "STDiT2"
        and "_class_name" not in saved
        and values.get("qk_norm")
        and "qk_norm_legacy" not in saved
    ):
        values["qk_norm_legacy"] = True  # Open-Sora writes every key since it has this one
        notes.append(
            "config.json: qk_norm without qk_norm_legacy is of Open-Sora 1.1: qk_norm_legacy=True"
        )
    if name == "STDiT3" and "_class_name" not in saved and "kernel_size" in saved:
        values["use_cond"] = True
        notes.append(
            "config.json: kernel_size is of Open-Sora 1.3, which embeds conditioning frames: use_cond=True"
        )
    return name, values, tuple(notes)


def choose_config(
    place: Path, saved: dict[str, Any] | None, model: str | None, overrides: dict[str, Any]
) -> tuple[str, Any, tuple[str, ...]]:
    """Class, configuration and notes: from ``config.json`` where there is one, else from the class or preset given.

    Raises:
        ValueError: if neither says, or both do and differ.
    """
    if saved is None:
        if model is None:
            raise ValueError(
                f"got {place} without config.json; expected to be told the model; pass model= (--model), one of "
                f"{[*CLASSES, *PRESETS]}, and the options that it was trained with"
            )
        _check_types(model, overrides)
        told = f"no config.json: configured as {model}, {overrides}"
        return model_class(model).__name__, resolve_config(model, **overrides), (told,)
    name, values, notes = understood(saved, place)
    if model is not None:
        preset = PRESETS[model][1] if model in PRESETS else {}
        of_preset = {key: value for key, value in preset.items() if key not in overrides}
        asked = {"_class_name": model_class(model).__name__, **of_preset}
        _refuse_differing(place, asked, _defaults(name) | values | {"_class_name": name})
    if overrides:
        notes = (*notes, f"config.json: overridden by {overrides}")
    try:
        _check_types(name, {**values, **overrides})
        return name, resolve_config(name, **{**values, **overrides}), notes
    except ValueError as error:
        what = f"config.json, overridden by {overrides}," if overrides else "config.json"
        raise ValueError(f"got {place}, of whose {what} no model can be built: {error}") from None


def check_model_config(
    folder: Path, name: str, config: Any, *, convert: Collection[str] = ()
) -> None:
    """Raise ValueError if the weights in ``folder`` are said to be of a model of another class or configuration.

    Keys that the file lacks have their default, and those that a conversion is for may differ; names and shapes of the
    tensors are checked by themselves.
    """
    saved = saved_config(folder)
    if saved is None:
        raise ValueError(
            f"got {folder} without config.json; expected the model's configuration; check the path"
        )
    theirs_name, values, _ = understood(saved, folder)
    free = MAY_DIFFER.union(*(CONVERSIONS[conversion].config_keys for conversion in convert))
    ours = {key: value for key, value in _plain(config).items() if key not in free}
    _refuse_differing(
        folder,
        {"_class_name": name, **ours},
        _defaults(theirs_name) | values | {"_class_name": theirs_name},
    )


def check_encoders(model_config: Any, vae: Any, text_encoder: Any) -> None:
    """Raise ValueError if the encoders do not produce what the model takes."""
    pairs = [
        ("latent channels", "vae", vae.channels, "in_channels", model_config.in_channels),
        (
            "text features",
            "text_encoder",
            text_encoder.width,
            "caption_channels",
            model_config.caption_channels,
        ),
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


def _check_types(name: str, values: dict[str, Any]) -> None:
    """Raise ValueError if a setting is of another kind than its default, which a dataclass does not ask."""
    kinds: dict[type, Any] = {
        bool: bool,
        int: int,
        float: (int, float),
        tuple: (tuple, list),
        str: str,
    }
    for key, default in vars(model_class(name).Config()).items():
        kind = kinds.get(type(default))
        if kind is None or key not in values:
            continue
        value = values[key]
        if not isinstance(value, kind) or (
            isinstance(value, bool) and not isinstance(default, bool)
        ):
            raise ValueError(
                f"got {key} = {value!r} for {name}; expected {type(default).__name__}; correct it"
            )


def _refuse_differing(place: Path, asked: dict[str, Any], theirs: dict[str, Any]) -> None:
    asked = json.loads(json.dumps(asked))  # tuples are lists in JSON
    differing = [key for key in asked if theirs.get(key) != asked[key]]
    if differing:
        shown = ", ".join(
            f"{key} is {theirs.get(key)!r} there, {asked[key]!r} here" for key in differing[:4]
        )
        raise ValueError(
            f"got checkpoint {place} of another model ({shown}); expected one of the configured model; "
            "change the checkpoint or the config's model"
        )


def _defaults(name: str) -> dict[str, Any]:
    return _plain(CLASSES[name].Config())


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain
