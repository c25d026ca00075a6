"""The reference page of config keys, made from the schema: every key with its type, default and
meaning.

A section for what both runs know, one for each run, one for each dict inside, and one for each kind
of component (``dict(type=...)``), whose options are the constructor arguments of its classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.config.sections import SequenceParallel
from opensora_sp.data.resolutions import FRAMES, SIZES
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.models.registry import CLASSES, PRESETS
from opensora_sp.parallel.strategies import registered_strategies

INTRODUCTION = """\
# Config reference

Generated from the classes in `opensora_sp/config/`. Unknown keys are errors. The
[Configs](../configs.md#common-keys) introduces the common ones.
"""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
COMPONENTS = {"vae": LATENT_ENCODERS, "text_encoder": TEXT_ENCODERS, "scheduler": SCHEDULERS}


def page() -> str:
    """The page as Markdown."""
    shared = [key for key in TrainConfig.model_fields if _is_shared(key)]
    common = next(cls for cls in TrainConfig.__mro__ if issubclass(InferenceConfig, cls))
    parts = [
        INTRODUCTION,
        "## Training and sampling\n",
        prose(common.__doc__),
        fields_table(TrainConfig, shared),
    ]

    for title, schema in (("Training alone", TrainConfig), ("Sampling alone", InferenceConfig)):
        own = [key for key in schema.model_fields if key not in shared]
        parts += [f"## {title}\n", prose(schema.__doc__), fields_table(schema, own)]

    for key, schema in nested():
        parts += [
            f"## {key} = dict(...)\n",
            prose(schema.__doc__),
            fields_table(schema, list(schema.model_fields)),
        ]
        if schema is SequenceParallel:
            parts.append(strategies_table())
    return "\n".join([*parts, *_models(), *_components(), _names()])


def _is_shared(key: str) -> bool:
    """Whether a key is the same in both runs."""
    fields = [schema.model_fields.get(key) for schema in (TrainConfig, InferenceConfig)]
    train, sample = (
        None if field is None else repr((field.annotation, field.default, field.description))
        for field in fields
    )
    return train == sample


def nested() -> Iterator[tuple[str, type[BaseModel]]]:
    """(key, schema) of every nested dict with a schema in the two configs, each schema once."""
    seen: set[type[BaseModel]] = set()
    queue: list[type[BaseModel]] = [TrainConfig, InferenceConfig]
    while queue:
        for key, field in queue.pop(0).model_fields.items():
            for schema in _schemas(field.annotation):
                if schema not in seen:
                    seen.add(schema)
                    queue.append(schema)
                    yield key, schema


def _schemas(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return list(chain.from_iterable(map(_schemas, get_args(annotation))))


def fields_table(schema: type[BaseModel], keys: list[str]) -> str:
    """A table of keys of a pydantic model."""
    rows = [(key, schema.model_fields[key]) for key in keys]
    return _table(
        ("key", "type", "default", "meaning"),
        [
            (f"`{key}`", _field_type(field), _field_default(field), meaning(schema, key))
            for key, field in rows
        ],
    )


def strategies_table() -> str:
    """The registered parallel strategies: when each is used, and what it sends."""
    rows = [
        (f"`{one.label}`", f'`"{one.option}"`', one.condition, one.moves or "tokens")
        for one in registered_strategies()
    ]
    return (
        "### Parallel strategies\n\nOf those with one value of `strategy`, the first that applies "
        "is used. B samples, T frames, W windows, P ranks.\n\n"
        + _table(("name", "`strategy`", "used for", "sent"), rows)
    )


def meaning(schema: type[BaseModel], key: str) -> str:
    """The description of a key."""
    return " ".join((schema.model_fields[key].description or "").split())


def _field_type(field: FieldInfo) -> str:
    bounds = []
    for one in field.metadata:
        bounds += [f"{SIGNS[name]} {getattr(one, name)}" for name in SIGNS if hasattr(one, name)]
    return type_text(field.annotation) + (f", {', '.join(bounds)}" if bounds else "")


def _field_default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    return "as below" if isinstance(value, BaseModel) else f"`{value!r}`"


def type_text(annotation: Any) -> str:
    """A type in words: ``int or None``, ``"fp32" or "bf16"``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{one!r}`".replace("'", '"') for one in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(one) for one in arguments)

    if annotation is type(None):
        return "`None`"
    if origin in (list, tuple):
        inner = ", ".join("…" if one is Ellipsis else type_text(one) for one in arguments)
        return f"{origin.__name__} of {inner}"
    if origin in (dict, Mapping):
        key, value = arguments
        return "dict" if value is Any else f"dict of {type_text(key)} to {type_text(value)}"

    return "any" if annotation is Any else getattr(annotation, "__name__", str(annotation))


def _models() -> list[str]:
    """The model classes and their presets."""
    rows = [
        (f'`"{name}"`', cls.__name__, f"`{options}`") for name, (cls, options) in PRESETS.items()
    ]
    parts = [
        '## model = dict(type="...")\n',
        "A class, or a size of one by name; further options override those of the name.\n",
        _table(("type", "class", "options"), rows),
    ]
    for name, cls in CLASSES.items():
        parts += [f"### {name}\n", prose(cls.Config.__doc__), options_table(cls.Config)]
    return parts


def _components() -> list[str]:
    parts = []
    for key, known in COMPONENTS.items():
        parts.append(f'## {key} = dict(type="...")\n')
        for name, cls in known.items():
            parts += [f"### {name}\n", prose(cls.__doc__), options_table(cls)]
    return parts


def _names() -> str:
    """The names of sizes and lengths."""
    sizes = [
        (f'`"{name}"`', ", ".join(f"{h}x{w}" for h, w in ratios.values()))
        for name, ratios in SIZES.items()
    ]
    frames = ", ".join(f'`"{name}"` {count}' for name, count in FRAMES.items())
    return (
        "## Sizes and lengths by name\n\nHeight x width for each aspect ratio of a "
        f"`resolution`:\n\n{_table(('resolution', 'height x width'), sizes)}\nFrames of a "
        f"`num_frames`: {frames}.\n"
    )


def options_table(cls: Any) -> str:
    """A table of a class's constructor arguments."""
    hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    rows = []
    for name, one in inspect.signature(cls).parameters.items():
        default = "**required**" if one.default is one.empty else f"`{one.default!r}`"
        rows.append((f"`{name}`", type_text(hints.get(name, Any)), default))
    return _table(("option", "type", "default"), rows)


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: literals in single backticks, ``Args`` and ``Raises`` as lists."""
    lines = inspect.cleandoc(docstring or "").replace("``", "`").splitlines()
    shown: list[str] = []
    for line in lines:
        entry = re.match(r"    (\w+): (.*)", line)
        if line in ("Args:", "Raises:"):
            shown += ["", f"**{line}**", ""]
        elif entry:
            shown.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            shown.append(re.sub(r"^ {8}", "    ", line))
    return "\n".join(shown) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    text = ""
    for line in lines:
        cells = [cell.replace("|", "\\|") for cell in line]
        text += f"| {' | '.join(cells)} |\n"
    return text
