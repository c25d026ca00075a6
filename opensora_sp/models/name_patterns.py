"""Names chosen by patterns, as the config keys ``freeze`` and ``lora.targets`` take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``fnmatch``, with or without the ``!`` of an exception, fits a name."""
    return fnmatchcase(name, pattern.removeprefix("!"))


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that patterns choose: the last that matches decides, ``!pattern`` excludes."""
    chosen_names = []
    for name in names:
        matching = [pattern for pattern in patterns if matches(name, pattern)]
        if matching and not matching[-1].startswith("!"):
            chosen_names.append(name)
    return chosen_names
