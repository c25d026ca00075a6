"""Which line of a config file sets which key, read off its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .draft import DELETE, Key


def set_lines(tree: ast.Module) -> tuple[dict[Key, int], set[Key]]:
    """Key -> line of the last statement that sets it, and the keys whose value is no dict that adds
    to another.

    Dicts are looked into where they are written out, as ``dict(...)`` or ``{...}``. Functions are
    not followed.
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
    """Assignments and calls of ``update``, wherever they stand outside of functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assign):
            yield from (
                (key, node.value, node.lineno) for target in node.targets for key in _keys(target)
            )
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            yield from ((key, node.value, node.lineno) for key in _keys(node.target))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "update"
        ):
            for key in _keys(node.func.value):
                yield from (
                    ((*key, kw.arg), kw.value, kw.value.lineno) for kw in node.keywords if kw.arg
                )


def _keys(target: ast.expr) -> list[Key]:
    """The keys that ``a``, ``a["b"]`` or ``a.b`` stand for; none for anything else."""
    if isinstance(target, ast.Name):
        return [(target.id,)]
    if isinstance(target, (ast.Tuple, ast.List)):
        return [key for one in target.elts for key in _keys(one)]
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return [(*key, target.slice.value) for key in _keys(target.value)]
    if isinstance(target, ast.Attribute):
        return [(*key, target.attr) for key in _keys(target.value)]
    return []


def _inside(key: Key, value: ast.expr | None, line: int) -> Iterator[tuple[Key, int, bool]]:
    """A key and, where its value is a dict written out, the keys inside: (key, line, takes the
    place of another).
    """
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
