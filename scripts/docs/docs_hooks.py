"""What MkDocs calls while it builds the site: the reference pages are made from the code, not kept in ``docs/``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference_api
import reference_cli
import reference_config
import reference_errors
from mkdocs.structure.files import File, Files

PAGES = {
    "reference/config.md": reference_config.page,
    "reference/cli.md": reference_cli.page,
    "reference/api.md": reference_api.page,
    "reference/errors.md": reference_errors.page,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for place, page in PAGES.items():
        files.append(File.generated(config, place, content=page()))
    return files
