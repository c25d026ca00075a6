"""The folder in which compiled code is kept, for later runs and for the ranks of a node.

Inductor keeps graphs there and Triton its kernels. Both write under a name of their own and rename
the file, so that ranks which compile the same code at the same time disturb nobody, and none waits
for another.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_compile_cache() -> Path | None:
    """Set the folder, before anything is compiled; one that the environment sets stays.

    Returns:
        The folder; None where there is none that is this user's own and can be written to, and
        torch's own temporary one is used.
    """
    if (folder := _chosen_folder()) is None:
        logger.info("compiled code is kept for this boot only: the user has no home folder")
        return None

    try:
        _make_own(folder)
    except OSError as error:
        logger.warning("compiled code is kept for this boot only, since %s", error)
        # Inductor would fail there, or execute what another user wrote.
        os.environ.pop(INDUCTOR, None)
        return None

    os.environ[INDUCTOR] = str(folder)
    # Inductor would give each device a folder of its own, and each rank would compile all kernels.
    os.environ.setdefault(TRITON, str(folder / "triton"))
    return folder


def use_triton_cache() -> None:
    """Set the folder of Triton's kernels, where compiled code is kept, before any is compiled.

    One that the environment sets stays. Triton's own folder is one for all versions of Python,
    though it holds modules of one, and lies in the user's home folder, which may be missing or
    read-only: no kernel would then run.
    """
    if os.environ.get(TRITON) or os.environ.get("TRITON_HOME"):
        return

    try:
        if (folder := _chosen_folder()) is None:
            raise FileNotFoundError("the user has no home folder")
        _make_own(folder)
        kernels = folder / "triton"
    except OSError as error:
        kernels = Path(tempfile.mkdtemp(prefix="opensora_sp-triton-"))
        atexit.register(shutil.rmtree, kernels, ignore_errors=True)
        logger.info("Triton's kernels are kept for this process only: %s", error)
    os.environ[TRITON] = str(kernels)


def _chosen_folder() -> Path | None:
    """That of the environment, or the default; None for a user without a home folder."""
    return Path(os.environ[INDUCTOR]) if os.environ.get(INDUCTOR) else default_folder()


def _make_own(folder: Path) -> None:
    """Make a folder; raise OSError if it is another user's, or no file can be written to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    with tempfile.TemporaryFile(dir=folder):
        pass


def cache_folder() -> Path | None:
    """This project's folder in the user's cache folder; None for a user without a home folder."""
    if not (shared := os.environ.get("XDG_CACHE_HOME")):
        try:
            return Path.home() / ".cache" / "opensora_sp"
        except RuntimeError:  # HOME is not set, and no user has this process' number
            return None

    folder = Path(shared)
    own = not folder.exists() or folder.stat().st_uid == os.getuid()
    # Several users may share the folder; none reads what another wrote.
    return folder / ("opensora_sp" if own else f"opensora_sp-{os.getuid()}")


def default_folder() -> Path | None:
    """In the user's cache folder, one for the versions of Python, torch and Triton."""
    if (folder := cache_folder()) is None:
        return None
    python = "".join(platform.python_version_tuple()[:2])
    versions = f"python{python}-torch{torch.__version__}"
    if has_triton():
        versions += f"-triton{metadata.version('triton')}"
    return folder / "compiled" / versions


def has_triton() -> bool:
    """Whether Triton is installed, without an import of it."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return True
