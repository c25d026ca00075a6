"""Hooks of MkDocs: generate the reference pages from the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference_api
import reference_cli
import reference_config
import reference_errors
import reference_legacy
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PAGES = {
    "reference/config.md": reference_config.page,
    "reference/open_sora.md": reference_legacy.page,
    "reference/cli.md": reference_cli.page,
    "reference/api.md": reference_api.page,
    "reference/errors.md": reference_errors.page,
}


FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:)?//[^"]*"')


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for place, page in PAGES.items():
        files.append(File.generated(config, place, content=page()))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse pages that load anything from the network."""
    fetched = FETCHED.search(output)
    if fetched:
        raise PluginError(
            f"got {fetched[0]} in {page.file.src_path}; expected nothing from the network; keep a "
            "copy"
        )
    return output
