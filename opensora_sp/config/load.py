"""From a config file and command-line overrides to checked values.

Files are mmengine-style Python (``_base_`` lists, inherited dicts); they are code and run when loaded. Overrides are
data: ``key.sub=value``, where the value is a Python literal or else a string.
"""

from __future__ import annotations

import ast
import difflib
import json
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from .schema import InferenceConfig, TrainConfig

Checked = TypeVar("Checked", bound=BaseModel)


def load_train_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Load and check a training config.

    Raises:
        ValueError: naming the file and the key, for anything that is missing, unknown or does not fit.
    """
    return _load(TrainConfig, path, overrides)


def load_inference_config(
    path: str | Path, overrides: list[str] | None = None, values: dict[str, Any] | None = None
) -> InferenceConfig:
    """Load and check a sampling config; see ``load_train_config``.

    ``values`` are put over the config last, by dotted keys, as they are. A size among them replaces the config's.
    """
    return _load(InferenceConfig, path, overrides, values)


def dump_config(config: BaseModel) -> str:
    """The resolved config as a Python file that loads again to the same values."""
    lines = [f"{key} = {value!r}" for key, value in config.model_dump().items()]
    return "# The resolved config of a run; it can be run again.\n" + "\n".join(lines) + "\n"


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=value`` -> (["a", "b"], value)."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"got --cfg-options {text!r}; expected key=value; write for example sp_size=4")
    named = {"true": True, "false": False, "none": None, "null": None}
    if value.strip().lower() in named:
        return key.strip().split("."), named[value.strip().lower()]
    try:
        return key.strip().split("."), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return key.strip().split("."), value


def _load(
    schema: type[Checked],
    path: str | Path,
    overrides: list[str] | None,
    last: dict[str, Any] | None = None,
) -> Checked:
    if not Path(path).is_file():
        raise ValueError(f"got config {str(path)!r}, which is not a file; expected a .py config; see configs/")
    from mmengine.config import Config

    try:
        values = Config.fromfile(str(path), lazy_import=False).to_dict()
    except Exception as error:  # whatever the file's own code, or mmengine reading it, may raise
        raise ValueError(
            f"got config {str(path)!r}, which cannot be loaded ({type(error).__name__}: {error}); expected a Python "
            "file whose _base_ files exist; correct it"
        ) from error
    for text in overrides or []:
        keys, value = parse_override(text)
        _set(values, keys, value, text)
    if last and "resolution" in last:
        values = {key: value for key, value in values.items() if key not in ("image_size", "aspect_ratio")}
    for key, value in (last or {}).items():
        _set(values, key.split("."), value, f"{key}={value}")
    try:
        return schema(**values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, str(path))) from None


def _set(values: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    for i, key in enumerate(keys[:-1]):
        if not isinstance(values.setdefault(key, {}), dict):
            raise ValueError(
                f"got --cfg-options {text!r}, but {'.'.join(keys[: i + 1])} is {values[key]!r}; expected a dict there; "
                "check the key"
            )
        values = values[key]
    values[keys[-1]] = value


def explain(error: ValidationError, schema: type[BaseModel], path: str) -> str:
    """Every finding on a line of its own: got, expected, what to do."""
    lines = []
    for finding in error.errors():
        key = ".".join(str(part) for part in finding["loc"]) or "config"
        if finding["type"] == "extra_forbidden":
            known = _known_keys(schema, finding["loc"][:-1])
            close = difflib.get_close_matches(str(finding["loc"][-1]), known, n=1, cutoff=0.5)
            advice = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
            lines.append(f"got the unknown key {key!r}; expected a known one; {advice}")
        elif finding["type"] == "missing":
            lines.append(f"got no {key!r}; expected a value; set it in the config or with --cfg-options {key}=...")
        elif finding["type"] == "value_error":
            lines.append(str(finding["ctx"]["error"]))
        else:
            shown = json.dumps(finding["input"], default=repr)
            lines.append(f"got {key} = {shown}; {finding['msg']}; change {key}")
    return f"in {path}:\n  " + "\n  ".join(lines)


def _known_keys(schema: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue  # a place in a list
        annotation = schema.model_fields[part].annotation if part in schema.model_fields else None
        models = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
        found = next((one for one in models if issubclass(one, BaseModel)), None)
        if found is None:
            return []
        schema = found
    return list(schema.model_fields)
