"""Fixtures of runs that are started as users start them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import TRAIN, write_toy_set


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training config of 14 clips; nothing may be written beside it."""
    folder = tmp_path_factory.mktemp("set")
    manifest = write_toy_set(folder, 14)
    text = TRAIN.format(manifest=str(manifest)) + "grad_checkpoint = False\n"
    (folder / "config.py").write_text(text)
    return folder / "config.py"
