"""A config before it is checked: its values, and where each of them was set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Key = tuple[Any, ...]
"""A key by its parts: ``("model", "depth")``."""
DELETE = "_delete_"
"""In a dict: take the place of the inherited dict, do not add to it."""


def dotted(key: Key) -> str:
    """``("model", "depth")`` -> ``"model.depth"``."""
    return ".".join(str(part) for part in key)


class Draft:
    """Nested values, and ``origins``: key -> place. What lies below a key is from there too, unless
    it has its own.
    """

    def __init__(
        self, values: dict[str, Any] | None = None, origins: dict[Key, str] | None = None
    ) -> None:
        self.values = values or {}
        self.origins = origins or {}
        self.notes: list[str] = []  # what became of keys of Open-Sora
        self.foreign = False  # whether it is a config of Open-Sora

    def __contains__(self, key: Key) -> bool:
        return self.get(key, _MISSING) is not _MISSING

    def get(self, key: Key, default: Any = None) -> Any:
        found: Any = self.values
        for part in key:
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found

    def origin(self, key: Key) -> str | None:
        """Where a value was set; None if nobody set it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None

    def set(self, key: Key, value: Any, origin: str) -> None:
        """Set a value. A dict takes the place of the one that is there; None takes it away.

        Raises:
            ValueError: if one of the keys above holds something else than a dict, or a dict would
                give way to something that is none.
        """
        there = self._above(key, origin)
        last = _as_known(there, key[-1])
        key = (*key[:-1], last)
        if isinstance(there.get(last), dict) and value is not None and not isinstance(value, dict):
            raise ValueError(
                f"got {dotted(key)} = {value!r} in the place of a dict (of {self.origin(key)}); "
                f"expected a dict; write {dotted(key)}.part=value for a part of it, or "
                f"{dotted(key)}=None to have none [{origin}]"
            )
        self.forget(key)
        there[last] = _without_delete(value)
        self.origins[key] = origin

    def pop(self, key: Key) -> Any:
        """Take a value out, with where it and what lies below it came from."""
        *above, last = key
        value = self.get(tuple(above)).pop(last)
        self.forget(key)
        return value

    def forget(self, key: Key) -> None:
        """Forget where a key and all below it came from."""
        for known in [one for one in self.origins if one[: len(key)] == key]:
            del self.origins[known]

    def _above(self, key: Key, origin: str) -> dict[Any, Any]:
        there: Any = self.values
        for i, part in enumerate(key[:-1]):
            there = there.setdefault(_as_known(there, part), {})
            if not isinstance(there, dict):
                raise ValueError(
                    f"got {origin}, but {dotted(key[: i + 1])} is {there!r}; expected a dict "
                    "there; check the key"
                )
        return there


def leaves(values: dict[Any, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The values of nested dicts that are no dicts, or empty ones, by their keys."""
    for part, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, part))
        else:
            yield (*above, part), value


def _as_known(there: dict[Any, Any], part: Any) -> Any:
    """The key itself, or the number that it spells where the dict has numbers:
    bucket_config.240p.51.
    """
    number = int(part) if isinstance(part, str) and part.isdecimal() else part
    return number if any(isinstance(one, int) for one in there) else part


def _without_delete(value: Any) -> Any:
    if isinstance(value, dict):
        return {part: _without_delete(inner) for part, inner in value.items() if part != DELETE}
    return value


_MISSING = object()
