"""Prompts from the command line or a file."""

from __future__ import annotations

import csv
from pathlib import Path


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a .txt file (one a line, empty lines skipped) or a .csv file (column ``prompt`` or ``text``).

    Raises:
        ValueError: if the file is missing, of another kind, or holds no prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"got prompts {str(path)!r}, which is not a file; expected a .txt or .csv; check the path")
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            column = next((name for name in ("prompt", "text") if name in (reader.fieldnames or [])), None)
            if column is None:
                raise ValueError(
                    f"got {str(path)!r} with the columns {reader.fieldnames}; expected 'prompt' or 'text'; rename one"
                )
            prompts = [row[column] or "" for row in reader]
    elif path.suffix == ".txt":
        prompts = path.read_text(encoding="utf-8").splitlines()
    else:
        raise ValueError(f"got prompts file {str(path)!r}; expected .txt or .csv; rename or convert it")
    prompts = [prompt.strip() for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ValueError(f"got prompts file {str(path)!r} without prompts; expected at least one; add a line")
    return prompts
