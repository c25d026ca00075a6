"""The line of a config file that sets each key, found in its syntax tree."""

from __future__ import annotations

import ast
from itertools import chain
from typing import Any

from .draft import DELETE, Key


class SetLines(ast.NodeVisitor):
    """Visits the statements of a file in their order. Functions and classes are skipped.

    Keys inside dict literals, ``dict(...)`` or ``{...}``, have entries of their own.

    Attributes:
        lines: key -> line of the last statement that sets it.
        replacing: the keys that replace inherited values. Other keys are dicts that are merged into
            the inherited dict.
    """

    def __init__(self) -> None:
        self.lines: dict[Key, int] = {}
        self.replacing: set[Key] = set()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return

        self.generic_visit(node)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, node.lineno)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            self._assign(node.target, node.value, node.lineno)
        elif isinstance(node, ast.Call):
            self._update(node)

    def _assign(self, target: ast.expr, value: ast.expr | None, line: int) -> None:
        for key in _keys(target):
            self._set(key, value, line)

    def _update(self, call: ast.Call) -> None:
        """``model.update(depth=4)``."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            for part, value in _keywords(call).items():
                self._assign(ast.Attribute(call.func.value, part), value, value.lineno)

    def _set(self, key: Key, value: ast.expr | None, line: int) -> None:
        for known in [known for known in self.lines if known[: len(key)] == key]:
            del self.lines[known]
            self.replacing.discard(known)

        self.lines[key] = line
        entries = _entries(value)
        if entries is None or DELETE in entries:
            self.replacing.add(key)

        for part, inner in (entries or {}).items():
            if part != DELETE:
                self._set((*key, part), inner, inner.lineno)


def _keys(target: ast.expr) -> list[Key]:
    """The keys that ``a``, ``a["b"]``, ``a.b`` or a tuple of these set; none for anything else."""
    if isinstance(target, ast.Name):
        return [(target.id,)]
    if isinstance(target, (ast.Tuple, ast.List)):
        return list(chain.from_iterable(map(_keys, target.elts)))
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return [(*key, target.slice.value) for key in _keys(target.value)]
    if isinstance(target, ast.Attribute):
        return [(*key, target.attr) for key in _keys(target.value)]
    return []


def _entries(value: ast.expr | None) -> dict[Any, ast.expr] | None:
    """The entries of a dict literal; None for any other value."""
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values)
        return {key.value: inner for key, inner in pairs if isinstance(key, ast.Constant)}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        return _keywords(value)
    return None


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
