"""A model with somebody's parallelism, as functions of a file, and layouts that it declares."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

REQUIRED = ("build", "batch", "apply")


class DefinitionError(ValueError):
    """The definition cannot be checked; got / expected / what to do."""


@dataclass(frozen=True)
class Cut:
    """Rank r holds the r-th part of axis ``dim``, in the order of the ranks."""

    dim: int


@dataclass(frozen=True)
class Heads(Cut):
    """Rank r holds the r-th part of the attention heads, which lie on axis ``dim``."""


Layout = Cut | Literal["replicated"]


@dataclass
class Applied:
    """Results of ``apply``; all are optional.

    Attributes:
        model: the model to run, where ``apply`` has wrapped it.
        gradients: reduction of the ranks' gradients that is right: "sum", "mean", or "none" if each
            rank has them whole. By default the checker infers it.
        layouts: of modules' outputs, by the module's name; "output" is the model's.
    """

    model: nn.Module | None = None
    gradients: Literal["sum", "mean", "none"] | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)


def load_definition(source: Any) -> Any:
    """The definition itself, or the module of a file, with all functions that are required.

    Raises:
        DefinitionError: if it has not, or if the file cannot be imported.
    """
    definition = _import_file(Path(source)) if isinstance(source, str | Path) else source
    missing = [name for name in REQUIRED if not callable(getattr(definition, name, None))]
    if missing:
        raise DefinitionError(
            f"got a definition without {' and '.join(missing)} ({source}); expected build(), "
            "batch(seed) and apply(model, group), and optionally step(model, batch); add "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    return definition


def _import_file(path: Path) -> Any:
    # For modules next to it.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        return SimpleNamespace(**runpy.run_path(str(path), run_name=path.stem))
    except Exception as error:
        raise DefinitionError(
            f"got {type(error).__name__} from {path} ({error}); expected a Python file that can be "
            "imported; pass its path, or mend it"
        ) from error


def applied_of(answer: Any, model: nn.Module) -> Applied:
    """What ``apply`` has returned, as ``Applied`` with a model."""
    applied = answer if isinstance(answer, Applied) else Applied(gradients=answer)
    if applied.gradients not in (None, "sum", "mean", "none"):
        raise DefinitionError(
            f"got {applied.gradients!r} from apply; expected None, 'sum', 'mean', 'none' or "
            "Applied(...), the reduction of the ranks' gradients; return one of them"
        )
    applied.model = applied.model or model
    return applied
