"""The reference page of error messages: every message that the package raises for users, read from its source.

A message is a ``ValueError`` in three parts, got ...; expected ...; what to do. What is filled in at run time is shown
as an ellipsis. Nothing is imported, so the page does not depend on what is installed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "opensora_sp"
INTRODUCTION = """\
# All error messages

Every message that opensora_sp raises for a mistake of its user, by the module that raises it, made from the source when
this site was built; … is what is filled in. The search of this site finds them. The usual ones, with why they come up,
are under [troubleshooting](../troubleshooting.md).
"""


@dataclass(frozen=True)
class Message:
    """An error or a warning of a module, as a pattern with ``…`` for what is filled in."""

    module: str  # "training/run.py"
    text: str
    is_warning: bool


def messages() -> Iterator[Message]:
    """All of the package, in the order of its files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            told = _told(node)
            if told is not None and told[0].strip("… \n"):
                yield Message(module, *told)


def _told(node: ast.AST) -> tuple[str, bool] | None:
    """(text, whether it is a warning) of a statement that tells users something."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call, is_warning = node.exc, False
        wanted = ast.unparse(call.func) == "ValueError"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        call, is_warning = node, True
        wanted = ast.unparse(node.func) in ("logger.warning", "logger.error")
    else:
        return None
    return (_pattern(call.args[0]), is_warning) if wanted and call.args else None


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
    """One part of a message a line."""
    return inspect.cleandoc(text).replace("; expected", ";\nexpected").replace("%s", "…").replace("%d", "…")
