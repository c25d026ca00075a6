"""From a config file and command-line overrides to checked values.

Files are mmengine-style Python (``_base_`` lists, inherited dicts); they are code and run when
loaded. Overrides are data: ``key.sub=value``, where the value is a Python literal or else a string.
Keys of Open-Sora are translated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .components import check_overriding_types
from .draft import Draft, dotted, leaves
from .files import read_config
from .findings import explain, raise_together
from .inference_config import InferenceConfig
from .legacy import Run
from .options import apply_options
from .train_config import TrainConfig
from .translate import check_family, translate

Checked = TypeVar("Checked", bound=BaseModel)
SCHEMAS: dict[Run, type[BaseModel]] = {"train": TrainConfig, "sample": InferenceConfig}
logger = logging.getLogger(__name__)


def load_train_config(
    path: str | Path, overrides: list[str] | None = None, *, manifest: str | None = None
) -> TrainConfig:
    """Load and check a training config.

    Args:
        manifest: where the config names no clips, for callers that read others.

    Raises:
        ValueError: with the file, the line and the key of everything missing, unknown or invalid.
    """
    draft = load_draft(path, overrides, run="train")
    names_clips = any(draft.get(f"dataset.{key}") is not None for key in ("manifest", "path"))
    if manifest is not None and not names_clips:
        draft.set("dataset.manifest", manifest, "--manifest")
    return _checked(TrainConfig, draft, path)


def load_inference_config(
    path: str | Path, overrides: list[str] | None = None, values: dict[str, Any] | None = None
) -> InferenceConfig:
    """Load and check a sampling config; see ``load_train_config``.

    Args:
        values: dotted key -> value, applied last. A size among them replaces the config's size.
    """
    return _checked(InferenceConfig, load_draft(path, overrides, values, run="sample"), path)


def saved_train_config(
    values: dict[str, Any], source: str | Path, overrides: list[str] | None = None
) -> TrainConfig:
    """The training config that a checkpoint keeps as JSON, with overrides, checked.

    Raises:
        ValueError: for what does not fit, and for the names of classes to import: a checkpoint is
            data, and importing a module executes it.
    """
    for key in ("model", "vae", "text_encoder", "scheduler"):
        name = str(values.get(key, {}).get("type"))
        if "." in name:
            raise ValueError(
                f"got {key}.type {name!r} in {source}, which is data and may not name what is "
                "imported; expected a name without a module; pass the run's own config with "
                "--config CONFIG"
            )

    buckets = values.get("bucket_config")
    if isinstance(buckets, dict):
        # JSON has texts for the numbers of frames.
        with_numbers = {}
        for resolution, entries in buckets.items():
            with_numbers[resolution] = {int(frames): one for frames, one in entries.items()}
        values = {**values, "bucket_config": with_numbers}

    if values.get("epochs") is not None:
        # Beside them a run records how many steps they were.
        values = {**values, "max_steps": 0}

    draft = Draft(dict(values), {(key,): str(source) for key in values})
    try:
        apply_options(draft, overrides or [])
        check_overriding_types(draft)
    except ValueError as error:
        raise ValueError(f"in {source}:\n  {error}") from None
    return _checked(TrainConfig, draft, source)


def load_either(
    path: str | Path, overrides: list[str] | None = None
) -> tuple[TrainConfig | InferenceConfig, Draft]:
    """A training config or else a sampling config, by its keys, and the origins of its values."""
    draft = read_config(path)
    trains = any(key in draft for key in ("dataset", "data_path", "max_steps", "epochs"))
    run: Run = "train" if trains else "sample"
    draft = load_draft(path, overrides, run=run)
    return _checked(SCHEMAS[run], draft, path), draft  # type: ignore[return-value]


def load_draft(
    path: str | Path,
    overrides: list[str] | None = None,
    values: dict[str, Any] | None = None,
    *,
    run: Run,
) -> Draft:
    """Values of a file and the command line, translated but not validated yet.

    Logs a line for each translated key.
    """
    draft = read_config(path)

    try:
        apply_options(draft, overrides or [])
        if values and "resolution" in values:
            for key in ("image_size", "aspect_ratio"):
                draft.pop(key)
        settings = (
            partial(draft.set, key, value, _flag(key)) for key, value in (values or {}).items()
        )
        raise_together(*settings)
        check_family(draft)
        translate(draft, run)
        check_overriding_types(draft)
    except ValueError as error:
        raise ValueError(f"in {path}:\n  {error}") from None

    # An empty dict is an inherited one that was removed with _delete_.
    draft.values = {key: value for key, value in draft.values.items() if value != {}}
    for note in draft.notes:
        logger.info("%s", note)
    return draft


def dump_config(config: BaseModel) -> str:
    """The resolved config as a Python file that loads again to the same values."""
    lines = [f"{key} = {value!r}" for key, value in config.model_dump().items()]
    return "# The resolved config of a run; it can be run again.\n" + "\n".join(lines) + "\n"


# Keys that are derived from others if they are not set.
DERIVED_FROM = {
    "image_size": ("resolution", "bucket_config"),
    "num_frames": ("bucket_config",),
    "batch_size": ("bucket_config",),
    "model.input_size": ("num_frames", "image_size", "resolution"),
}


def sources(config: BaseModel, draft: Draft) -> Iterator[tuple[str, Any, str]]:
    """(key, value, origin) of all values: file and line, option, another key, or the default."""
    for key, value in leaves(config.model_dump()):
        name, is_set = dotted(key), draft.get(key) is not None
        sources_of = [one for one in DERIVED_FROM.get(name, ()) if one in draft]

        if is_set and value is None:
            yield name, value, f"used up for image_size, {draft.origin(key)}"
        elif is_set or (key in draft and not sources_of):
            yield name, value, draft.origin(key) or ""
        elif sources_of:
            yield name, value, f"from {sources_of[0]}, {draft.origin(sources_of[0])}"
        else:
            yield name, value, "default"


def _checked(schema: type[Checked], draft: Draft, path: str | Path) -> Checked:
    try:
        return schema(**draft.values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, str(path), draft)) from None


def _flag(key: str) -> str:
    """The command-line option that sets a key."""
    return "--" + key.rpartition(".")[2].replace("_", "-")
