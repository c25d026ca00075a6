"""From a config file and command-line overrides to checked values.

Files are mmengine-style Python (``_base_`` lists, inherited dicts); they are code and run when
loaded. Overrides are data: ``key.sub=value``, where the value is a Python literal or else a string.
Keys of Open-Sora become ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .draft import Draft, dotted, leaves
from .files import read_config
from .findings import explain, together
from .legacy import Run
from .options import apply_options
from .schema import InferenceConfig, TrainConfig
from .translate import check_family, translate

Checked = TypeVar("Checked", bound=BaseModel)
SCHEMAS: dict[Run, type[BaseModel]] = {"train": TrainConfig, "sample": InferenceConfig}
logger = logging.getLogger(__name__)


def load_train_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Load and check a training config.

    Raises:
        ValueError: naming the file, the line and the key, for all that is missing, unknown or does
            not fit.
    """
    return _checked(TrainConfig, load_draft(path, overrides, run="train"), path)


def load_inference_config(
    path: str | Path, overrides: list[str] | None = None, values: dict[str, Any] | None = None
) -> InferenceConfig:
    """Load and check a sampling config; see ``load_train_config``.

    ``values`` are put over the config last, by dotted keys, as they are. A size among them replaces
    the config's.
    """
    return _checked(InferenceConfig, load_draft(path, overrides, values, run="sample"), path)


def load_either(
    path: str | Path, overrides: list[str] | None = None
) -> tuple[TrainConfig | InferenceConfig, Draft]:
    """A training config, which has clips, or else a sampling config; and where its values come
    from.
    """
    draft = read_config(path)
    trains = any((key,) in draft for key in ("dataset", "data_path", "max_steps", "epochs"))
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
    """What a file and the command line say, in our keys, not checked yet; logs what became of
    others.
    """
    draft = read_config(path)
    place = str(path)
    try:
        apply_options(draft, overrides or [])
        if values and "resolution" in values:
            for key in ("image_size", "aspect_ratio"):
                if (key,) in draft:
                    draft.pop((key,))
        together(
            *(
                partial(draft.set, tuple(key.split(".")), value, _flag(key))
                for key, value in (values or {}).items()
            )
        )
        check_family(draft)
        translate(draft, run)
    except ValueError as error:
        raise ValueError(f"in {place}:\n  {error}") from None
    draft.values = {
        key: value for key, value in draft.values.items() if value != {}
    }  # says nothing
    for note in draft.notes:
        logger.info("%s", note)
    return draft


def dump_config(config: BaseModel) -> str:
    """The resolved config as a Python file that loads again to the same values."""
    lines = [f"{key} = {value!r}" for key, value in config.model_dump().items()]
    return "# The resolved config of a run; it can be run again.\n" + "\n".join(lines) + "\n"


FROM = {  # what is made of other values where it is not said
    "image_size": ("resolution", "bucket_config"),
    "num_frames": ("bucket_config",),
    "batch_size": ("bucket_config",),
    "model.input_size": ("num_frames", "image_size", "resolution"),
}


def sources(config: BaseModel, draft: Draft) -> Iterator[tuple[str, Any, str]]:
    """Key, value and where it comes from: a file and its line, an option, other keys, or the
    default.
    """
    for key, value in leaves(config.model_dump()):
        name, said = dotted(key), key in draft
        made = [
            f"from {one}, {draft.origin((one,))}" for one in FROM.get(name, ()) if (one,) in draft
        ]
        if said and value is None and draft.get(key) is not None:
            yield name, value, f"used up for image_size, {draft.origin(key)}"
        elif said and not (made and draft.get(key) is None):
            yield name, value, draft.origin(key) or ""
        else:
            yield name, value, made[0] if made else "default"


def _checked(schema: type[Checked], draft: Draft, path: str | Path) -> Checked:
    try:
        return schema(**draft.values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, str(path), draft)) from None


def _flag(key: str) -> str:
    """The option of the command line that a key is set by."""
    return "--" + key.rpartition(".")[2].replace("_", "-")
