"""The folder in which compiled code is kept, for later runs and for the ranks of a node.

Inductor keeps graphs there and Triton its kernels. Both write under a name of their own and rename
the file, so that ranks which compile the same code at the same time disturb nobody, and none waits
for another.
"""

from __future__ import annotations

import logging
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_compile_cache() -> Path | None:
    """Set the folder, before anything is compiled; one that the environment sets stays.

    Returns:
        The folder; None where it cannot be written to, and torch's own temporary one is used.
    """
    folder = Path(os.environ.get(INDUCTOR) or default_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.warning("compiled code is kept for this boot only, since %s", error)
        return None

    os.environ[INDUCTOR] = str(folder)
    # Inductor would give each device a folder of its own, and each rank would compile all kernels.
    os.environ.setdefault(TRITON, str(folder / "triton"))
    return folder


def default_folder() -> Path:
    """In the user's cache folder, one for the versions of Python, torch and Triton."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = "".join(platform.python_version_tuple()[:2])
    versions = f"python{python}-torch{torch.__version__}"
    if has_triton():
        versions += f"-triton{metadata.version('triton')}"
    return folder / "opensora_sp" / "compiled" / versions


def has_triton() -> bool:
    """Whether Triton is installed, without an import of it."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return True
