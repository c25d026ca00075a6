"""``config.json`` next to weights, ours or of the public Open-Sora checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from opensora_sp.models.registry import (
    CLASSES,
    PRESETS,
    loaded_classes,
    model_class,
    resolve_config,
)

from .reader import saved_config
from .state_dict import CONVERSIONS

# Settings of a run, not of the weights.
MAY_DIFFER = frozenset({"class_dropout_prob", "drop_path", "attention"})
# Written by transformers about the file, or by Open-Sora about how it runs or trains. None changes
# what the model computes.
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype",
        "transformers_version", "enable_flash_attn", "enable_flashattn", "enable_layernorm_kernel",
        "enable_sequence_parallelism", "force_huggingface", "freeze", "freeze_y_embedder",
        "from_pretrained", "input_size", "only_train_temporal",
    }
)  # fmt: skip
# Largest numbers of a config.json: modules and tables are made before weights are compared.
# MAX_DEPTH is for files of fewer tensors.
MAX_SETTING, MAX_TABLE, MAX_DEPTH = 1 << 16, 1 << 26, 64


def model_config_json(name: str, config: Any) -> bytes:
    """The content of ``config.json`` next to the weights."""
    values = {"_class_name": name, **dataclasses.asdict(config)}
    return (json.dumps(values, indent=1) + "\n").encode()


def write_model_config(folder: Path, name: str, config: Any) -> None:
    """Write ``config.json`` next to the weights."""
    (folder / "config.json").write_bytes(model_config_json(name, config))


def parse_model_config(
    saved: dict[str, Any], source: Path
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The model's class, its settings, and notes on keys that were ignored or added.

    Args:
        saved: content of a ``config.json``.
        source: the weights that it belongs to, for messages.

    Raises:
        ValueError: if it is of another kind of model, or has settings whose effect is not known.
    """
    name = _class_name(saved, source)
    known = {field.name for field in dataclasses.fields(model_class(name).Config)}
    values = {key: setting for key, setting in saved.items() if key in known}

    others = saved.keys() - known - {"_class_name"}
    _refuse_unknown(name, {key: saved[key] for key in saved if key in others}, source, known)
    notes = [f"config.json: ignored {', '.join(sorted(others))}"] if others else []

    if "_class_name" not in saved:
        implied, reason = model_class(name).Config.implied_by(saved)
        values |= implied
        notes += [f"config.json: {reason}"] if implied else []
    return name, values, tuple(notes)


def _class_name(saved: dict[str, Any], source: Path) -> str:
    architectures = saved.get("architectures") or ()
    names = [saved.get("_class_name"), *architectures, saved.get("model_type")]
    known = loaded_classes()
    for name in names:
        if name in known:
            return str(name)

    given = [name for name in names if name] or "no model"
    raise ValueError(
        f"got {source} with a config.json of {given}; expected one of {list(known)} under "
        "_class_name, architectures or model_type; check the path, correct the file, or name a "
        "class of yours: model='my_package.MyModel'"
    )


def _refuse_unknown(name: str, others: dict[str, Any], source: Path, known: set[str]) -> None:
    unknown = [
        f"{key} = {setting!r}"
        for key, setting in others.items()
        # True would change the model in a way that is not implemented here.
        if key not in WITHOUT_EFFECT and (key, setting) != ("no_temporal_pos_emb", False)
    ]
    if unknown:
        raise ValueError(
            f"got {source} with {', '.join(unknown[:6])} in config.json; expected settings of "
            f"{name} ({', '.join(sorted(known))}); the effect of other settings on the weights is "
            "not known: remove them if they change nothing"
        )


def choose_config(
    source: Path,
    saved: dict[str, Any] | None,
    model: str | None,
    overrides: dict[str, Any],
    *,
    num_tensors: int = 0,
) -> tuple[str, Any, tuple[str, ...]]:
    """Class, configuration and notes: from ``config.json`` if there is one, else from ``model``.

    Args:
        saved: content of their ``config.json``.
        overrides: settings that replace values of ``config.json`` or of the preset.
        num_tensors: how many tensors the weights have, which bounds the number of blocks.

    Raises:
        ValueError: if neither names the model, or both do and differ, or no model can be built.
    """
    if saved is None:
        if model is None:
            raise ValueError(
                f"got {source} without config.json; expected the name of the model; pass model= "
                f"(--model), one of {[*CLASSES, *PRESETS]}, and the options that it was trained "
                "with"
            )
        _check_types(model, overrides)
        note = f"no config.json: configured as {model}, {overrides}"
        return model_class(model).__name__, resolve_config(model, **overrides), (note,)

    name, values, notes = parse_model_config(saved, source)
    if model is not None and issubclass(model_class(model), model_class(name)):
        # The additions of a derived class are drawn at random; with adapters they are missing.
        name = model_class(model).__name__
    if model is not None:
        preset = PRESETS[model][1] if model in PRESETS else {}
        wanted = {key: preset[key] for key in preset if key not in overrides}
        wanted["_class_name"] = model_class(model).__name__
        refuse_differing(source, wanted, name, values)
    if overrides:
        notes = (*notes, f"config.json: overridden by {overrides}")

    try:
        _check_types(name, {**values, **overrides})
        _check_sizes(values, max(num_tensors, MAX_DEPTH))
        return name, resolve_config(name, **{**values, **overrides}), notes
    except ValueError as error:
        what = f"config.json, overridden by {overrides}," if overrides else "config.json"
        raise ValueError(f"got {source}, of whose {what} no model can be built: {error}") from None


def check_model_config(
    folder: Path, name: str, config: Any, *, convert: Collection[str] = (), allow_base: bool = False
) -> None:
    """Compare the configured model with the ``config.json`` of weights.

    Keys that the file lacks have their default. Names and shapes of the tensors are checked
    elsewhere.

    Args:
        convert: conversions, whose settings may differ.
        allow_base: the file may name a class that the model's is derived from, without the settings
            that the latter adds.

    Raises:
        ValueError: if the file is missing, or names another class or configuration.
    """
    saved = saved_config(folder)
    if saved is None:
        raise ValueError(
            f"got {folder} without config.json; expected the model's configuration; check the path"
        )

    saved_name, values, _ = parse_model_config(saved, folder)
    known = {field.name for field in dataclasses.fields(config)}
    if allow_base and issubclass(model_class(name), model_class(saved_name)):
        name = saved_name
        known = {field.name for field in dataclasses.fields(model_class(name).Config)}

    may_differ = MAY_DIFFER.union(*(CONVERSIONS[other].config_keys for other in convert))
    settings = dataclasses.asdict(config)
    wanted = {key: settings[key] for key in settings if key in known - may_differ}
    refuse_differing(folder, {"_class_name": name, **wanted}, saved_name, values)


def check_encoders(model_config: Any, vae: Any, text_encoder: Any) -> None:
    """Raise ValueError if the encoders do not produce what the model expects."""
    widths = [("in_channels", "vae", vae.channels)]
    widths += [("caption_channels", "text_encoder", text_encoder.width)]
    for key, encoder, width in widths:
        expected = getattr(model_config, key)
        if width != expected:
            raise ValueError(
                f"got {width} channels from {encoder} and model.{key} = {expected}; expected them "
                f"to agree; set model.{key}={width} or choose another {encoder}"
            )
    check_text_length(text_encoder.max_length, model_config)


def check_text_length(max_length: int, model_config: Any) -> None:
    """Raise ValueError if captions can be longer than a model's configuration allows."""
    limit = model_config.model_max_length
    if max_length > limit:
        raise ValueError(
            f"got text_encoder.max_length {max_length} over model.model_max_length {limit}; "
            "expected at most that; lower the one or raise the other"
        )


def _check_types(name: str, values: dict[str, Any]) -> None:
    """Raise ValueError if a setting has another type than annotated: dataclasses do not check."""
    config = model_class(name).Config
    types = get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name not in values:
            continue

        setting, annotated = values[field.name], types[field.name]
        try:
            # Strict: a string of digits is no number. In JSON, tuples are lists.
            TypeAdapter(annotated).validate_json(json.dumps(setting), strict=True)
        except (ValidationError, TypeError):
            expected = getattr(annotated, "__name__", annotated)
            raise ValueError(
                f"got {field.name} = {setting!r} for {name}; expected {expected}; correct it"
            ) from None


def _check_sizes(values: dict[str, Any], max_depth: int) -> None:
    """Raise ValueError if settings, whose types are right, ask for more than any model has."""
    for name, setting in values.items():
        numbers = setting if isinstance(setting, list) else [setting]
        largest = max((number for number in numbers if isinstance(number, int | float)), default=0)
        allowed = max_depth if name == "depth" else MAX_SETTING
        if largest > allowed:
            raise ValueError(f"got {name} = {setting!r}; expected at most {allowed}; correct it")

    table = math.prod(values.get("input_size") or [0]) * values.get("hidden_size", 1)
    if table > MAX_TABLE:
        raise ValueError(
            f"got position tables of {table} numbers for input_size {values['input_size']!r}; "
            f"expected at most {MAX_TABLE}; correct it"
        )


def refuse_differing(
    source: Path, wanted: dict[str, Any], name: str, values: dict[str, Any]
) -> None:
    """Raise ValueError unless the model ``name`` of saved ``values`` has the wanted settings."""
    saved = {**dataclasses.asdict(model_class(name).Config()), **values, "_class_name": name}
    # Tuples are lists in JSON.
    wanted, saved = json.loads(json.dumps([wanted, saved]))
    differing = {
        key: f"{key} is {saved.get(key)!r} there, {setting!r} here"
        for key, setting in wanted.items()
        if saved.get(key) != setting
    }
    if differing:
        helpful = [key for key in CONVERSIONS if CONVERSIONS[key].config_keys & differing.keys()]
        hint = f", or request the conversion: convert={helpful}" if helpful else ""
        raise ValueError(
            f"got checkpoint {source} of another model ({', '.join([*differing.values()][:4])}); "
            "expected one of the configured model; change the checkpoint or the config's model"
            f"{hint}"
        )
