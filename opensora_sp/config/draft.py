"""A config before validation: its values, the origin of each, and errors that name origins.

Errors are reported all at once: got, expected, what to do, and where it was set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from opensora_sp.common.importing import nearest

Run = Literal["train", "sample"]
Key = tuple[Any, ...]
"""The parts of a dotted key: ``("model", "depth")``."""

DELETE = "_delete_"
"""In a dict: replace the inherited dict instead of merging into it."""

DICTS_OR_PATHS = {("scheduler", "cache_curve")}
"""Keys of dicts that the path of a JSON file may replace."""

_MISSING = object()
# Begins most messages of pydantic.
_INPUT = "Input should be "
# Options of a command that are no keys of its config.
COMMAND_OPTIONS = ("resume", "profile")


def key_of(name: str | Key) -> Key:
    """``"model.depth"`` -> ``("model", "depth")``."""
    return tuple(name.split(".")) if isinstance(name, str) else name


def dotted(key: Key) -> str:
    """``("model", "depth")`` -> ``"model.depth"``."""
    return ".".join(str(part) for part in key)


class Draft:
    """Nested values, and ``origins``: key -> place where it was set.

    Methods take keys, or their dotted names if all parts are texts. Keys below a key have its
    origin, unless they have their own.

    Attributes:
        notes: messages about translated keys of Open-Sora.
        foreign: this is a config of Open-Sora.
        overridden: the keys that the command line has set, also to None.
    """

    def __init__(
        self, values: dict[str, Any] | None = None, origins: dict[Key, str] | None = None
    ) -> None:
        self.values = values or {}
        self.origins = origins or {}
        self.notes: list[str] = []
        self.run: Run = "train"
        self.foreign = False
        self.overridden: frozenset[Key] = frozenset()

    def __contains__(self, key: str | Key) -> bool:
        return self.get(key, _MISSING) is not _MISSING

    def get(self, key: str | Key, default: Any = None) -> Any:
        content: Any = self.values
        for part in key_of(key):
            if not isinstance(content, dict) or part not in content:
                return default
            content = content[part]
        return content

    def origin(self, key: str | Key) -> str | None:
        """Place where a value was set; None if it was not."""
        key = key_of(key)
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None

    def set(self, key: str | Key, setting: Any, origin: str) -> None:
        """Set a value. A dict replaces an existing one, and None removes it.

        Raises:
            ValueError: if a key above is not a dict, or another value would replace a dict.
        """
        *above, last = key_of(key)
        parent = self._parent(above, origin)
        last = _as_known(parent, last)
        key = (*above, last)

        replaces_dict = isinstance(parent.get(last), dict) and not isinstance(setting, dict)
        if replaces_dict and setting is not None and key not in DICTS_OR_PATHS:
            raise ValueError(
                f"got {dotted(key)} = {setting!r} in the place of a dict (of {self.origin(key)}); "
                f"expected a dict; write {dotted(key)}.part=value for a part of it, or "
                f"{dotted(key)}=None to have none [{origin}]"
            )

        # Keys below it were set in the value that is replaced.
        self.forget(key)
        parent[last] = _without_delete(setting)
        self.origins[key] = origin

    def pop(self, key: str | Key) -> None:
        """Remove a value, if there is one, with its origin and the origins below it."""
        key = key_of(key)
        if key in self:
            del self.get(key[:-1])[key[-1]]
            self.forget(key)

    def forget(self, key: Key) -> None:
        """Remove the origins of a key and of all below it."""
        for known in [other for other in self.origins if other[: len(key)] == key]:
            del self.origins[known]

    def _parent(self, above: list[Any], origin: str) -> dict[Any, Any]:
        """The dict at a key, made if it does not exist."""
        parent: dict[Any, Any] = self.values
        for i, part in enumerate(above):
            parent = parent.setdefault(_as_known(parent, part), {})
            if not isinstance(parent, dict):
                raise ValueError(
                    f"got {origin}, but {dotted(tuple(above[: i + 1]))} is {parent!r}; expected a "
                    "dict there; check the key"
                )
        return parent


def is_option(origin: str | None) -> bool:
    """True if a value was set on the command line, by its origin."""
    return (origin or "").startswith("--")


def leaves(values: dict[Any, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(key, setting) of the leaves of nested dicts; an empty dict is a leaf."""
    for part, setting in values.items():
        if isinstance(setting, dict) and setting:
            yield from leaves(setting, (*above, part))
        else:
            yield (*above, part), setting


def _as_known(values: dict[Any, Any], part: Any) -> Any:
    """The key, as an int in dicts with int keys: ``bucket_config.240p.51``."""
    number = int(part) if isinstance(part, str) and part.isdecimal() else part
    return number if any(isinstance(known, int) for known in values) else part


def _without_delete(setting: Any) -> Any:
    if isinstance(setting, dict):
        return {part: _without_delete(inner) for part, inner in setting.items() if part != DELETE}
    return setting


class ConfigError(ValueError):
    """Several problems of a config, a message each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n  ".join(self.messages))


def messages_of(error: ValueError) -> list[str]:
    """The messages of one problem or of several."""
    return error.messages if isinstance(error, ConfigError) else [str(error)]


def raise_together(*checks: Callable[[], object] | str) -> None:
    """Run all checks, and raise one ``ConfigError`` with the messages of all that failed.

    Args:
        checks: functions that raise ValueError, or messages of errors found already.
    """
    messages: list[str] = []
    for check in checks:
        if isinstance(check, str):
            messages.append(check)
            continue
        try:
            check()
        except ValueError as error:
            messages += messages_of(error)
    if messages:
        # Several checks may find the same.
        raise ConfigError(dict.fromkeys(messages))


def explain(
    error: ValidationError, schema: type[BaseModel], source: str, draft: Draft | None = None
) -> str:
    """The message for a pydantic error: one line per finding, with the origins of its keys.

    Args:
        source: of the values, such as the path of the config.
        draft: the origins of keys; None for values without a config file.
    """
    lines = []
    for finding in error.errors():
        for message in _messages(finding, schema):
            if draft is not None:
                message += _origins(draft, tuple(finding["loc"]), message)
                message += _other_section(draft, finding["loc"], message)
            lines.append(message)
    return f"in {source}:\n  " + "\n  ".join(dict.fromkeys(lines))


def _messages(finding: Any, schema: type[BaseModel]) -> list[str]:
    # Without the names that pydantic gives to the types of a union and to keys.
    parts = [str(part) for part in finding["loc"]]
    key = ".".join(part for part in parts if not re.search(r"\[|^constrained-", part)) or "config"

    if finding["type"] == "extra_forbidden":
        known = _known_keys(schema, finding["loc"][:-1])
        advice = nearest(finding["loc"][-1], known, otherwise=f"known keys are {', '.join(known)}")
        if key in COMMAND_OPTIONS:
            advice = f"pass the option --{key} {finding['input']}"
        return [f"got the unknown key {key!r}; expected a known one; {advice}"]

    if finding["type"] == "missing":
        option = f"--cfg-options {key}=..."
        return [f"got no {key!r}; expected a value; set it in the config or with {option}"]

    if finding["type"] == "value_error":
        return messages_of(finding["ctx"]["error"])

    shown = json.dumps(finding["input"], default=repr)
    return [f"got {key} = {shown}; expected {expected_by(finding)}; change {key}"]


def expected_by(finding: Any) -> str:
    """The expected value of a pydantic error, as a noun phrase."""
    kind: str = finding["type"]
    text: str = finding["msg"]
    if kind == "missing":
        return "one more entry"

    phrase = text.removeprefix(_INPUT)
    if phrase == text:
        return f"another value ({text})"
    if kind.startswith(("greater_than", "less_than")):
        return f"a number {phrase}"

    # "a valid integer, unable to parse string as an integer"; the values of a literal have commas.
    return phrase if kind == "literal_error" else phrase.partition(", ")[0]


def _origins(draft: Draft, loc: Key, message: str) -> str:
    """Origins of a finding's keys: the keys in the message one level below ``loc``, or ``loc``."""
    got = message.partition("; ")[0]
    inside = [key for key in draft.origins if key[: len(loc)] == loc and len(key) > len(loc)]

    named: dict[Key, str] = {}
    for key in inside:
        is_named = re.search(rf"(?<!\w){re.escape(str(key[-1]))}(?!\w)", got)
        if len(key) == len(loc) + 1 and is_named:
            named[key] = draft.origins[key]

    if not named and loc:
        origin = draft.origin(loc) or next((draft.origins[key] for key in inside), None)
        named = {loc: origin} if origin else {}

    # Of several keys, each origin needs its name.
    if len(named) < 2:
        return "".join(f" [{origin}]" for origin in named.values())
    return f" [{', '.join(f'{dotted(key)}: {origin}' for key, origin in named.items())}]"


def _other_section(draft: Draft, loc: Key, message: str) -> str:
    """The advice where the command line has changed a section's type, and not its options."""
    if "unknown key" not in message or not is_option(draft.origins.get((*loc, "type"))):
        return ""
    name = draft.get((*loc, "type"))
    return (
        f"; the section's other options stay as in the file: replace it with --cfg-options "
        f"\"{dotted(loc)}=dict(type='{name}', ...)\""
    )


def _known_keys(schema: type[BaseModel], path: Key) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue  # an index of a list
        annotation = schema.model_fields[part].annotation if part in schema.model_fields else None
        classes = [cls for cls in (annotation, *get_args(annotation)) if isinstance(cls, type)]
        section = next((cls for cls in classes if issubclass(cls, BaseModel)), None)
        if section is None:
            return []
        schema = section
    return list(schema.model_fields)
