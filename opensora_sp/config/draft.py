"""A config before validation: its values and the origin of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

Run = Literal["train", "sample"]
Key = tuple[Any, ...]
"""The parts of a dotted key: ``("model", "depth")``."""

DELETE = "_delete_"
"""In a dict: replace the inherited dict instead of merging into it."""


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
        run: the kind of config.
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
        if replaces_dict and setting is not None:
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


_MISSING = object()
