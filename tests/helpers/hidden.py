"""Processes to which installed packages are hidden, as if they were not installed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Python runs it in each process, also in those that a launcher or multiprocessing starts.
SITE_CUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""


def environment_without(hidden: Iterable[str], folder: Path) -> dict[str, str]:
    """The environment of processes that find no modules of these names.

    Args:
        hidden: names as in import statements, without dots.
        folder: an empty one.
    """
    text = SITE_CUSTOMIZE.format(hidden=sorted(hidden))
    (folder / "sitecustomize.py").write_text(text)
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    environment = {name: text for name, text in os.environ.items() if name not in own}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return environment | {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": path, "OMP_NUM_THREADS": "1"}


def all_modules_but(*packages: str) -> set[str]:
    """The modules of all installed packages but some, those that they require, and this one."""
    kept, missing = {"opensora-sp"}, list(packages)
    while missing:
        name = _normalized(missing.pop())
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            # For another platform or version of Python.
            continue
        if name not in kept:
            kept.add(name)
            missing += [
                re.split(r"[^\w.-]", text)[0] for text in requirements if "extra ==" not in text
            ]
    return {
        module
        for module, sources in metadata.packages_distributions().items()
        if not kept & {_normalized(source) for source in sources}
    }


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
