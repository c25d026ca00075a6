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


def use_compile_cache() -> None:
    """Set the folders of Inductor's graphs and of Triton's kernels, before anything is compiled.

    Folders that the environment sets stay, unless one of graphs is another user's, whose code would
    be executed, or cannot be written to.
    """
    os.environ[INDUCTOR] = str(_usable_folder())
    use_triton_cache()


def use_triton_cache() -> None:
    """Set the folder of Triton's kernels, before any is compiled.

    One that the environment sets stays. Triton's default folder is shared by all versions of
    Python, though it holds modules of one, and lies in the user's home folder, which may be missing
    or read-only: no kernel would then run.
    """
    if not (os.environ.get(TRITON) or os.environ.get("TRITON_HOME")):
        # Inductor would give each device a folder, and each rank would compile all kernels.
        os.environ[TRITON] = str(_usable_folder() / "triton")


def _usable_folder() -> Path:
    """The folder for compiled code; a temporary one of this process where that cannot be used."""
    try:
        folder = _folder_of_user() or default_folder()
        if folder is None:
            raise FileNotFoundError("the user has no home folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="opensora_sp-compiled-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        logger.warning("compiled code is kept for this process only: %s", error)
        return temporary


def _folder_of_user() -> Path | None:
    """The folder of graphs that the user's environment sets.

    At an import of ``torch._dynamo`` torch sets the variable as well, to a temporary folder.
    """
    if not (name := os.environ.get(INDUCTOR)):
        return None
    folder = Path(name)
    is_of_torch = folder.name.startswith("torchinductor_")
    return None if is_of_torch and folder.parent == Path(tempfile.gettempdir()) else folder


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
