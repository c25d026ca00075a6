"""``--cfg-options key.sub=value``: values are data, never code."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from .draft import Draft
from .findings import raise_together

FLAG = "--cfg-options"
WORDS = {"true": True, "false": False, "none": None, "null": None}
UNQUOTED = (
    "colossalai run passes options on without quotes, so spaces, quotes and brackets get lost: "
    "start with torchrun, or write the value into a config file"
)


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=value`` -> (["a", "b"], value).

    A value is a Python literal (also ``dict(a=1)``), true, false, none or null in upper or lower
    case, or else a string.

    Raises:
        ValueError: without ``=``, and for malformed lists, dicts and quoted strings.
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(
            f"got {FLAG} {text!r}; expected key=value; write for example sp_size=4. Was it longer? "
            f"{UNQUOTED}"
        )

    value = value.strip()
    if value.lower() in WORDS:
        return parts, WORDS[value.lower()]

    try:
        return parts, ast.literal_eval(_with_dicts(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if value.startswith(("[", "(", "{", "'", '"', "dict(")):
            raise ValueError(
                f"got {FLAG} {text!r}, whose value begins like a list, a dict or a quoted text and "
                f"ends otherwise; expected a whole one, with its texts in quotes; {UNQUOTED}"
            ) from None
        return parts, value


def apply_options(draft: Draft, texts: Sequence[str]) -> None:
    """Apply ``--cfg-options`` to a draft.

    Raises:
        ValueError: with everything that is wrong with them.
    """
    found: list[str] = []
    seen: dict[tuple[str, ...], str] = {}
    for text in texts:
        try:
            keys, value = parse_override(text)
            _check_braces(text, value, seen.get(tuple(keys)))
            seen[tuple(keys)] = text
            draft.set(tuple(keys), value, f"{FLAG} {text}")
        except ValueError as error:
            found.append(str(error))
    raise_together(*found)


def _check_braces(text: str, value: Any, before: str | None) -> None:
    """Raise ValueError where a shell has expanded ``x={a:1,b:2}`` into ``x=a:1 x=b:2``."""
    if before is not None and isinstance(value, str) and ":" in value and ":" in before:
        raise ValueError(
            f"got {FLAG} {before!r} and {text!r}; expected a key once. Are they parts of one dict? "
            f"Then {UNQUOTED}"
        )


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
