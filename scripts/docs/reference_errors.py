"""The reference page of error messages: every message that the package raises for users, read from
its source.

A message is a ``ValueError`` in three parts, got ...; expected ...; what to do. What is filled in
at run time is shown as an ellipsis. Nothing is imported, so the page does not depend on what is
installed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "opensora_sp"
MIN_LETTERS = 12
WARNINGS = ("logger.warning", "logger.error", "warnings.warn")
INTRODUCTION = """\
# All error messages

Every error and warning of opensora_sp for its users, by module, generated from the source; … stands
for values. The search of this site finds them. The common ones and their causes are under
[troubleshooting](../troubleshooting.md).
"""


@dataclass(frozen=True)
class Message:
    """An error or a warning of a module, as a pattern with ``…`` for what is filled in."""

    module: str  # "training/trainer.py"
    text: str
    is_warning: bool


def messages() -> Iterator[Message]:
    """All of the package, in the order of its files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        for text, is_warning in _messages_in(ast.parse(path.read_text())):
            if (
                len(re.findall("[A-Za-z]", text)) >= MIN_LETTERS
            ):  # not a frame around other messages
                yield Message(module, text, is_warning)


def _messages_in(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a warning) of a piece of code: errors, warnings, other
    texts "got ...".
    """
    raised = node.exc if isinstance(node, ast.Raise) else None
    if isinstance(raised, ast.Call) and ast.unparse(raised.func) == "ValueError":
        yield (_pattern(raised.args[0]) if raised.args else ""), False
        return

    if isinstance(node, ast.Call) and ast.unparse(node.func) in WARNINGS and node.args:
        yield _pattern(node.args[0]), True
        return

    if isinstance(node, ast.Constant | ast.JoinedStr) and _pattern(node).startswith("got "):
        yield _pattern(node), False
        return

    for child in ast.iter_child_nodes(node):
        yield from _messages_in(child)


def _pattern(node: ast.expr) -> str:
    """A string expression as text, with … for what it does not say itself."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    return "…"


def page() -> str:
    """The page as Markdown."""
    by_module: dict[str, list[Message]] = {}
    for message in messages():
        by_module.setdefault(message.module, []).append(message)
    parts = [INTRODUCTION]
    for module, found in by_module.items():
        parts.append(f"## {module}\n")
        for message in found:
            kind = "warning: " if message.is_warning else ""
            parts.append(f"```text\n{kind}{_wrapped(message.text)}\n```\n")
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    """A message in lines that fit the page, its three parts apart."""
    filled = re.sub(r"%[-.\d]*[a-z]", "…", inspect.cleandoc(text)).replace(
        "; expected", ";\nexpected"
    )
    return "\n".join(line for part in filled.splitlines() for line in textwrap.wrap(part, 84))
