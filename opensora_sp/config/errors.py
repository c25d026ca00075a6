"""Errors of a config, reported all at once: got, expected, what to do, and where it was set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from opensora_sp.common.importing import nearest

from .draft import Draft, Key, dotted, is_option

# Begins most messages of pydantic.
_INPUT = "Input should be "
# Options of a command that are no keys of its config.
COMMAND_OPTIONS = ("resume", "profile")


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
    key = ".".join(str(part) for part in finding["loc"]) or "config"

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
