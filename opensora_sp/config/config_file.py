"""Config files: mmengine-style Python with ``_base_`` lists, and the line that sets each value.

mmengine reads the values. Two things that it accepts silently are errors here: a value that
replaces an inherited dict, and a key that is in two bases.
"""

from __future__ import annotations

import ast
import pickle
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import chain
from os.path import abspath, normpath
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from opensora_sp.common.files import MAX_BYTES, or_shipped, read_small_file
from opensora_sp.common.importing import nearest

from .draft import DELETE, DICTS_OR_PATHS, Draft, Key, dotted, leaves, raise_together

BASE = "_base_"
_FOLDER = re.compile(r"\{\{\s*fileDirname\s*\}\}")
NOT_DATA = (ModuleType, FunctionType, BuiltinFunctionType, type)
IMPORT_PAUSES = (0.2, 0.5, 1.0)  # seconds


def read_config(path: str | Path) -> Draft:
    """The values of a file and its bases.

    Names with a leading underscore, modules, classes and functions are not part of the config, nor
    are empty dicts: ``dict(_delete_=True)`` removes an inherited dict.

    Raises:
        ValueError: if a file is missing, cannot be run, or contradicts those that it is based on.
    """
    path = or_shipped(path)
    if not path.is_file():
        raise ValueError(
            f"got config {str(path)!r}, which is not a file; expected a .py config; "
            f"{_advice_for(path)}"
        )
    draft = _read(str(path), within=())
    draft.values = {
        key: setting
        for key, setting in draft.values.items()
        if not key.startswith("_") and not isinstance(setting, NOT_DATA) and setting != {}
    }
    return draft


def _advice_for(path: Path) -> str:
    """Files that may be meant by a path that is not one."""
    if path.is_dir():
        inside = sorted(config.name for config in path.glob("*.py"))
        return f"pass a file of this folder: {', '.join(inside)}" if inside else "see configs/"

    siblings = [config.name for config in path.parent.glob("*.py")]
    return nearest(path.name, siblings, otherwise="see configs/")


def files_of(path: str | Path) -> list[Path]:
    """A config file and all that it is based on, each once; errors as of ``read_config``."""
    files = [Path(path)]
    for base in _bases(str(path), _parsed(str(path))):
        files += [file for file in files_of(base) if file not in files]
    return files


def _read(path: str, *, within: tuple[str, ...]) -> Draft:
    if path in within:
        raise ValueError(
            f"got config {path!r}, which is based on itself ({' -> '.join((*within, path))}); "
            "expected no circle; take one of the _base_ out"
        )

    # Bases are read one by one as well: mmengine's merged values have no origins.
    tree = _parsed(path)
    bases = [_read(base, within=(*within, path)) for base in _bases(path, tree)]
    inherited = _joined(path, bases)

    draft = Draft(_values(path, tree), dict(inherited.origins))
    statements = SetLines()
    statements.visit(tree)
    for key, line in statements.lines.items():
        # The keys of a replaced dict have no origin any more.
        if key in statements.replacing:
            draft.forget(key)
        draft.origins[key] = f"{path}:{line}"

    raise_together(*_replaced(inherited, draft))
    return draft


def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse(read_small_file(path, MAX_BYTES, "a config").decode())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(path, error, getattr(error, "lineno", None)) from error


def _bases(path: str, tree: ast.Module) -> list[str]:
    """Paths of the files in the ``_base_`` of a file."""
    folder = Path(path).parent
    absolute = str(folder.absolute())

    for node in tree.body:
        if not isinstance(node, ast.Assign) or BASE not in map(_name, node.targets):
            continue

        where = f"[{path}:{node.lineno}]"
        try:
            listed = ast.literal_eval(node.value)
        except ValueError as error:
            raise ValueError(
                "got a _base_ that is computed; expected a path or a list of paths; write them "
                f"out {where}"
            ) from error

        bases = []
        for name in [listed] if isinstance(listed, str) else listed:
            base = normpath(folder / _FOLDER.sub(lambda _: absolute, name))
            if not Path(base).is_file():
                raise ValueError(
                    f"got the base {base!r}, which cannot be loaded (FileNotFoundError); "
                    f"expected a file; correct _base_ {where}"
                )
            bases.append(base)
        return bases
    return []


def _name(target: ast.expr) -> str | None:
    return target.id if isinstance(target, ast.Name) else None


def _values(path: str, tree: ast.Module) -> dict[str, Any]:
    config_class = _import_config_class()
    try:
        # Without lazy_import=False, mmengine guesses it from the paths of imported modules.
        values: dict[str, Any] = config_class.fromfile(path, lazy_import=False).to_dict()
        return values
    except Exception as error:  # the file is code, which may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if frame.filename == abspath(path)]
        raise _unreadable(path, error, ours[-1].lineno if ours else None) from error


def _import_config_class() -> Any:
    """mmengine's ``Config``.

    mmengine imports yapf, which writes a cache at its first import on a machine, not atomically. A
    rank that imports it at the same moment may read a part of that file, so it tries again.
    """
    for pause in IMPORT_PAUSES:
        with suppress(EOFError, pickle.UnpicklingError):
            from mmengine.config import Config

            return Config
        time.sleep(pause)
    return import_module("mmengine.config").Config


def _unreadable(path: str, error: Exception, line: int | None) -> ValueError:
    return ValueError(
        f"got config {path!r}, which cannot be loaded ({type(error).__name__}: {error}); expected "
        f"a Python file whose _base_ files exist; correct it [{path}{f':{line}' if line else ''}]"
    )


def _joined(path: str, bases: list[Draft]) -> Draft:
    """The values of several bases.

    Raises:
        ValueError: for keys that two of them set.
    """
    joined = Draft()
    for base in bases:
        both = [key for key in joined.values if key in base.values and not key.startswith("_")]
        raise_together(
            *(
                f"got {key!r} in two files that {path} is based on ({joined.origin(key)}, "
                f"{base.origin(key)}); expected each key in one of them; base one of the two "
                "on the other"
                for key in both
            )
        )
        joined.values |= base.values
        joined.origins |= base.origins
    return joined


def _replaced(inherited: Draft, draft: Draft) -> Iterator[str]:
    """A message for each inherited dict that another value has replaced."""
    dicts: set[Key] = set()
    for leaf, _ in leaves(inherited.values):
        dicts |= {leaf[:length] for length in range(1, len(leaf))}

    for key in sorted(dicts):
        if key not in DICTS_OR_PATHS and key in draft and not isinstance(draft.get(key), dict):
            name = dotted(key)
            yield (
                f"got {name} = {draft.get(key)!r} in the place of an inherited dict (of "
                f"{inherited.origin(key)}); expected a dict, which adds to it; write "
                f"{name}=dict(_delete_=True, ...) for another one, or {name}=dict(_delete_=True) "
                f"to have none [{draft.origin(key)}]"
            )


class SetLines(ast.NodeVisitor):
    """The line of a file that sets each key, found in its syntax tree.

    Visits statements in their order. Functions and classes are skipped.

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

    def _assign(self, target: ast.expr, expression: ast.expr | None, line: int) -> None:
        for key in _keys(target):
            self._set(key, expression, line)

    def _set(self, key: Key, expression: ast.expr | None, line: int) -> None:
        # An assignment replaces what statements before it have set below the key.
        for known in [known for known in self.lines if known[: len(key)] == key]:
            del self.lines[known]
            self.replacing.discard(known)

        self.lines[key] = line
        entries = _entries(expression)
        if entries is None or DELETE in entries:
            self.replacing.add(key)

        for part, inner in (entries or {}).items():
            if part != DELETE:
                self._set((*key, part), inner, inner.lineno)


def _keys(target: ast.expr) -> list[Key]:
    """The keys that ``a``, ``a["b"]`` or a tuple of these set; none for anything else."""
    if isinstance(target, ast.Name):
        return [(target.id,)]
    if isinstance(target, (ast.Tuple, ast.List)):
        return list(chain.from_iterable(map(_keys, target.elts)))
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return [(*key, target.slice.value) for key in _keys(target.value)]
    return []


def _entries(literal: ast.expr | None) -> dict[Any, ast.expr] | None:
    """The entries of a dict literal; None for any other value."""
    if isinstance(literal, ast.Dict):
        pairs = zip(literal.keys, literal.values)
        return {key.value: inner for key, inner in pairs if isinstance(key, ast.Constant)}
    if isinstance(literal, ast.Call) and ast.unparse(literal.func) == "dict":
        return {keyword.arg: keyword.value for keyword in literal.keywords if keyword.arg}
    return None
