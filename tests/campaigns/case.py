"""One fault of a campaign."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """A fault and where it strikes.

    ``name`` is unique in its campaign and the same for the same seed. ``trials`` counts what the
    case tries, where it tries more than one fault. Cases ``in_sample`` run in CI as well.
    """

    name: str
    arguments: Any = None
    trials: int = 1
    in_sample: bool = False


def with_sample(cases: Iterable[Case], names: Iterable[str]) -> list[Case]:
    """The cases, of which those with these names are in the sample; each name must exist."""
    cases, names = list(cases), set(names)
    missing = names - {case.name for case in cases}
    assert not missing, f"no cases {sorted(missing)} in {[case.name for case in cases]}"
    return [replace(case, in_sample=case.name in names) for case in cases]
