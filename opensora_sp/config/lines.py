"""The line of a config file that sets each key, found in its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from typing import TypeGuard

from .draft import DELETE, Key


def set_lines(tree: ast.Module) -> tuple[dict[Key, int], set[Key]]:
    """Key -> line of the last statement that sets it, and the keys that replace inherited values.

    Keys inside dict literals, ``dict(...)`` or ``{...}``, have entries of their own. Bodies of
    functions are ignored. Other keys are dicts that are merged into the inherited dict.
    """
    lines: dict[Key, int] = {}
    whole: set[Key] = set()
    for key, value, line in sorted(_settings(tree), key=lambda setting: setting[2]):
        for known in [one for one in lines if one[: len(key)] == key]:
            del lines[known]
            whole.discard(known)

        for inner, at, is_whole in _inside(key, value, line):
            lines[inner] = at
            if is_whole:
                whole.add(inner)
    return lines, whole


def _settings(tree: ast.Module) -> Iterator[tuple[Key, ast.expr | None, int]]:
    """(key, value, line) of assignments and calls of ``update`` outside of functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        todo += ast.iter_child_nodes(node)

        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((key, node.value, node.lineno) for key in _keys(target))
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            yield from ((key, node.value, node.lineno) for key in _keys(node.target))
        elif isinstance(node, ast.Call) and _is_update(node.func):
            named = [keyword for keyword in node.keywords if keyword.arg]
            for key in _keys(node.func.value):
                yield from (((*key, one.arg), one.value, one.value.lineno) for one in named)


def _is_update(function: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(function, ast.Attribute) and function.attr == "update"


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


def _inside(key: Key, value: ast.expr | None, line: int) -> Iterator[tuple[Key, int, bool]]:
    """(key, line, whether it replaces an inherited value), also of the keys in a dict literal."""
    entries: list[tuple[object, ast.expr]] | None = None
    if isinstance(value, ast.Dict):
        entries = [
            (one.value, inner)
            for one, inner in zip(value.keys, value.values)
            if isinstance(one, ast.Constant)
        ]
    elif (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict"
    ):
        entries = [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg]

    yield key, line, entries is None or any(part == DELETE for part, _ in entries)
    for part, inner in entries or []:
        if part != DELETE:
            yield from _inside((*key, part), inner, inner.lineno)
