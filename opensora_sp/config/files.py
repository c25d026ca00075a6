"""Config files, mmengine-style Python with ``_base_`` lists, with the file and line that each value
comes from.

mmengine reads the values. What it does without a word is refused here: a value in the place of an
inherited dict, and a key that two bases have.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from functools import reduce
from os.path import abspath, normpath
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from .draft import Draft, Key, dotted, leaves
from .findings import together
from .lines import set_lines

BASE = "_base_"
_FOLDER = re.compile(r"\{\{\s*fileDirname\s*\}\}")
NOT_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)


def read_config(path: str | Path) -> Draft:
    """The values of a file and of those that it is based on.

    Names with a leading underscore, modules, classes and functions are the file's own business. An
    empty dict says nothing, so ``dict(_delete_=True)`` takes an inherited dict away.

    Raises:
        ValueError: if a file is missing, cannot be run, or contradicts those that it is based on.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"got config {str(path)!r}, which is not a file; expected a .py config; see configs/"
        )
    draft = _read(str(path), within=())
    draft.values = {
        key: value
        for key, value in draft.values.items()
        if not key.startswith("_") and not isinstance(value, NOT_DATA) and value != {}
    }
    return draft


def _read(path: str, *, within: tuple[str, ...]) -> Draft:
    if path in within:
        raise ValueError(
            f"got config {path!r}, which is based on itself ({' -> '.join((*within, path))}); "
            "expected no circle; take one of the _base_ out"
        )
    tree = _parsed(path)
    bases = [_read(base, within=(*within, path)) for base in _bases(path, tree)]
    inherited = _joined(path, bases)
    draft = Draft(_values(path, tree), dict(inherited.origins))
    lines, whole = set_lines(tree)
    for key, line in lines.items():
        if key in whole:
            draft.forget(key)
        draft.origins[key] = f"{path}:{line}"
    together(*_replaced(inherited, draft))
    return draft


def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, getattr(error, "lineno", None)) from error


def _bases(path: str, tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == BASE for one in node.targets
        ):
            try:
                named = ast.literal_eval(node.value)
            except ValueError as error:
                raise ValueError(
                    "got a _base_ that is computed; expected a path or a list of paths; write "
                    f"them out [{path}:{node.lineno}]"
                ) from error
            folder = str(Path(path).parent)
            listed = [
                _FOLDER.sub(lambda _: str(Path(path).parent.absolute()), one)
                for one in _as_list(named)
            ]
            found = [normpath(Path(folder, one)) for one in listed]
            for base in found:
                if not Path(base).is_file():
                    raise ValueError(
                        f"got the base {base!r}, which cannot be loaded (FileNotFoundError); "
                        f"expected a file; correct _base_ [{path}:{node.lineno}]"
                    )
            return found
    return []


def _values(path: str, tree: ast.Module) -> dict[str, Any]:
    from mmengine.config import Config

    try:
        # Told that imports are not lazy, mmengine does not guess it from where the modules imported
        # lie.
        return Config.fromfile(path, lazy_import=False).to_dict()
    except Exception as error:  # whatever the file's own code, or mmengine reading it, may raise
        ours = [
            one
            for one in traceback.extract_tb(error.__traceback__)
            if one.filename == abspath(path)
        ]
        raise _unreadable(path, error, ours[-1].lineno if ours else None) from error


def _unreadable(path: str, error: Exception, line: int | None) -> ValueError:
    return ValueError(
        f"got config {path!r}, which cannot be loaded ({type(error).__name__}: {error}); expected "
        f"a Python file whose _base_ files exist; correct it [{path}{f':{line}' if line else ''}]"
    )


def _joined(path: str, bases: list[Draft]) -> Draft:
    def join(left: Draft, right: Draft) -> Draft:
        together(
            *(
                f"got {key!r} in two files that {path} is based on ({left.origin((key,))}, "
                f"{right.origin((key,))}); expected each key in one of them; base one of the two "
                "on the other"
                for key in left.values
                if key in right.values and not key.startswith("_")
            )
        )
        return Draft({**left.values, **right.values}, {**left.origins, **right.origins})

    return reduce(join, bases, Draft())


def _replaced(inherited: Draft, draft: Draft) -> Iterator[str]:
    """A message for each inherited dict that something else has taken the place of."""
    above: set[Key] = {
        key[:length] for key, _ in leaves(inherited.values) for length in range(1, len(key))
    }
    for key in sorted(above):
        if key in draft and not isinstance(draft.get(key), dict):
            name = dotted(key)
            yield (
                f"got {name} = {draft.get(key)!r} in the place of an inherited dict (of "
                f"{inherited.origin(key)}); expected a dict, which adds to it; write "
                f"{name}=dict(_delete_=True, ...) for another one, or {name}=dict(_delete_=True) "
                f"to have none [{draft.origin(key)}]"
            )


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
