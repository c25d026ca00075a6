"""From a config file and command-line overrides to checked values.

Files are mmengine-style Python (``_base_`` lists, inherited dicts); they are code and run when
loaded. Overrides are data: ``key.sub=value``, where the value is a Python literal or else a string.
Keys of Open-Sora are translated.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .components import check_overriding_types
from .config_file import read_config
from .draft import Draft, Run, dotted, explain, leaves, raise_together
from .inference_config import InferenceConfig
from .open_sora import translate
from .train_config import TrainConfig

Checked = TypeVar("Checked", bound=BaseModel)
SCHEMAS: dict[Run, type[BaseModel]] = {"train": TrainConfig, "sample": InferenceConfig}
KEYS_OF: dict[Run, tuple[str, ...]] = {
    "train": ("dataset", "data_path", "max_steps", "epochs"),
    "sample": ("prompts", "prompt", "prompt_path", "ckpt", "fps", "num_samples", "num_sample"),
}
FLAG = "--cfg-options"
WORDS = {"true": True, "false": False, "none": None, "null": None}
UNQUOTED = (
    "colossalai run passes options on without quotes, so spaces, quotes and brackets get lost: "
    "start with torchrun, or write the value into a config file"
)
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
        ValueError: for everything that does not fit, and for the names of classes to import: a
            checkpoint is data, and importing a module executes it.
    """
    # Before anything is validated, which imports these classes.
    for key in ("model", "vae", "text_encoder", "scheduler"):
        name = str(values.get(key, {}).get("type"))
        if "." in name:
            raise ValueError(
                f"got {key}.type {name!r} in {source}, which is data and may not name classes "
                "to import; expected a name without a module; pass the run's own config with "
                "--config CONFIG"
            )

    buckets = values.get("bucket_config")
    if isinstance(buckets, dict):
        # JSON has texts for the numbers of frames.
        with_numbers = {}
        for resolution, entries in buckets.items():
            with_numbers[resolution] = {int(n): bucket for n, bucket in entries.items()}
        values = {**values, "bucket_config": with_numbers}

    if values.get("epochs") is not None:
        # A run also records how many steps they were.
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
    # Open-Sora's keys are among them: the config is not translated yet.
    run = _run_of(read_config(path)) or "sample"
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

    Raises:
        ValueError: for a config of the other kind of run, and for options and keys that do not fit.
    """
    draft = read_config(path)
    if _run_of(draft) not in (None, run):
        raise ValueError(_other_run(draft, path, run))

    try:
        # Before translation: options may have keys of Open-Sora, too.
        apply_options(draft, overrides or [])
        # A config has one size: an option's size takes the place of any other.
        if values and "resolution" in values:
            for key in ("image_size", "aspect_ratio"):
                draft.pop(key)
        # A file takes the place of the config's own curve, which is a dict.
        if values and "scheduler.cache_curve" in values:
            draft.pop("scheduler.cache_curve")
        settings = (
            partial(draft.set, key, setting, _flag(key)) for key, setting in (values or {}).items()
        )
        raise_together(*settings)
        translate(draft, run)
        check_overriding_types(draft)
    except ValueError as error:
        raise ValueError(f"in {path}:\n  {error}") from None

    # An empty dict is an inherited one that was removed with _delete_.
    draft.values = {key: setting for key, setting in draft.values.items() if setting != {}}
    for note in draft.notes:
        logger.info("%s", note)
    return draft


def _run_of(draft: Draft) -> Run | None:
    """The kind of a file's config by its keys, ours or Open-Sora's; None where it has none of them.

    Keys of trainings decide: no sampling has them.
    """
    for run, keys in KEYS_OF.items():
        if any(key in draft for key in keys):
            return run
    return None


def _other_run(draft: Draft, path: str | Path, run: Run) -> str:
    if run == "sample":
        written = Path(draft.get("outputs") or draft.get("save_dir") or "RUN", "sample.py")
        return (
            f"got {path}, which is a training config; expected a sampling config; take the one "
            f"that the training writes into its folder, RUN/sample.py: here {written}"
        )
    return (
        f"got {path}, which is a sampling config; expected a training config; take the one of the "
        "run, RUN/config.py, or opensora-sp sample for this one"
    )


def dump_config(config: BaseModel) -> str:
    """The resolved config as a Python file that loads again to the same values."""
    lines = [f"{key} = {setting!r}" for key, setting in config.model_dump().items()]
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
    for key, setting in leaves(config.model_dump()):
        name, is_set = dotted(key), draft.get(key) is not None
        others = [other for other in DERIVED_FROM.get(name, ()) if other in draft]

        if is_set and setting is None:
            yield name, setting, f"used up for image_size, {draft.origin(key)}"
        elif is_set or (key in draft and not others):
            yield name, setting, draft.origin(key) or ""
        elif others:
            yield name, setting, f"from {others[0]}, {draft.origin(others[0])}"
        else:
            yield name, setting, "default"


def _checked(schema: type[Checked], draft: Draft, path: str | Path) -> Checked:
    try:
        return schema(**draft.values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, str(path), draft)) from None


def _flag(key: str) -> str:
    """The command-line option that sets a key."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


# Overrides


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=value`` -> (["a", "b"], value).

    A value is a Python literal (also ``dict(a=1)``), true, false, none or null in upper or lower
    case, or else a string.

    Raises:
        ValueError: without ``=``, and for malformed lists, dicts and quoted strings.
    """
    key, equals, literal = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(
            f"got {FLAG} {text!r}; expected key=value; write for example sp_size=4. Was it longer? "
            f"{UNQUOTED}"
        )

    literal = literal.strip()
    if literal.lower() in WORDS:
        return parts, WORDS[literal.lower()]

    try:
        return parts, ast.literal_eval(_with_dicts(literal))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if literal.startswith(("[", "(", "{", "'", '"', "dict(")):
            raise ValueError(
                f"got {FLAG} {text!r}, whose value begins like a list, a dict or a quoted text and "
                f"ends otherwise; expected a whole one, with its texts in quotes; {UNQUOTED}"
            ) from None
        return parts, literal


def apply_options(draft: Draft, texts: Sequence[str]) -> None:
    """Apply ``--cfg-options`` to a draft.

    Raises:
        ValueError: with everything that is wrong with them.
    """
    raise_together(*(partial(_apply_option, draft, text) for text in texts))


def _apply_option(draft: Draft, text: str) -> None:
    keys, setting = parse_override(text)
    draft.set(tuple(keys), setting, f"{FLAG} {text}")


def _with_dicts(text: str) -> ast.expr:
    """The expression with ``dict(a=1)`` replaced by ``{"a": 1}``."""
    replaced: ast.expr = _Dicts().visit(ast.parse(text, mode="eval").body)
    return replaced


class _Dicts(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args
        if not plain or not all(keyword.arg for keyword in node.keywords):
            return node
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys=keys, values=[keyword.value for keyword in node.keywords])
