"""Configs and prompts that the package ships, under the names that they have in its repository.

A path under ``configs/`` works in every folder: where there is no such file, the one of the
package is taken. ``opensora_sp/configs`` is a link in the repository, and a folder in a wheel.
"""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)
FOLDER = "configs"
SHIPPED = Path(__file__).parent / FOLDER


def or_shipped(path: str | Path) -> Path:
    """A path as it is if it exists, else that of the package's file of this name if there is one.

    Logs which file is taken from the package.
    """
    path = Path(path)
    shipped = SHIPPED.joinpath(*path.parts[1:])
    if path.exists() or path.parts[:1] != (FOLDER,) or not shipped.is_file():
        return path

    logger.info("%s is not in this folder; taken from the package: %s", path, shipped)
    return shipped


def shipped_name(path: Path) -> str:
    """``configs/...``, under which ``or_shipped`` finds a file of the package."""
    return f"{FOLDER}/{path.relative_to(SHIPPED).as_posix()}"
