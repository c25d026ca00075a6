"""Prompt files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opensora_sp.common.files import or_shipped, read_small_file
from opensora_sp.config import PromptOptions, explain

# Windows editors begin UTF-8 with a byte order mark, which is not part of the first prompt.
ENCODING = "utf-8-sig"
MAX_BYTES, MAX_PROMPTS = 16 << 20, 100_000


def read_prompts(path: str | Path) -> list[PromptOptions]:
    """Prompts of a .txt file (one per line) or a .csv file; lines without a prompt are skipped.

    A .csv file has a column ``prompt`` (or ``text``), and optionally others with the names of
    ``PromptOptions``. Empty cells take the config's value.

    Raises:
        ValueError: if the file is missing, of another kind, without prompts, has invalid values, or
            has more than ``MAX_BYTES`` or ``MAX_PROMPTS``.
    """
    path = or_shipped(path)
    if not path.is_file():
        raise ValueError(
            f"got prompts {str(path)!r}, which is not a file; expected a .txt or .csv; check the "
            "path"
        )
    if path.suffix not in (".txt", ".csv"):
        raise ValueError(
            f"got prompts file {str(path)!r}; expected .txt or .csv; rename or convert it"
        )

    try:
        text = read_small_file(path, MAX_BYTES, "a prompts file").decode(ENCODING)
        parsed = _rows(path, text) if path.suffix == ".csv" else _lines(text)
        prompts = list(islice(parsed, MAX_PROMPTS + 1))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"got prompts file {str(path)!r}, which cannot be read ({error}); expected UTF-8; save "
            "it as that"
        ) from None

    if len(prompts) > MAX_PROMPTS:
        raise ValueError(
            f"got prompts file {str(path)!r} with more than {MAX_PROMPTS:,} prompts; expected at "
            "most so many; split it"
        )
    if not prompts:
        raise ValueError(
            f"got prompts file {str(path)!r} without prompts; expected at least one; add a line"
        )
    return prompts


def _lines(text: str) -> Iterator[PromptOptions]:
    # Lines end as in a file, with LF, CR LF or CR, and not with other separators of Unicode.
    for line in io.StringIO(text, newline=None):
        if line.strip():
            yield PromptOptions(prompt=line.strip())


def _rows(path: Path, text: str) -> Iterator[PromptOptions]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    columns = ["prompt" if name == "text" else name.strip() for name in reader.fieldnames or []]
    if columns.count("prompt") != 1:
        raise ValueError(
            f"got {str(path)!r} with the columns {reader.fieldnames}; expected 'prompt' or "
            "'text'; rename one"
        )
    reader.fieldnames = columns

    for row in reader:
        if (row["prompt"] or "").strip():
            yield _checked(row, f"{path}, line {reader.line_num}")


def _checked(row: dict[str, str | None], origin: str) -> PromptOptions:
    if None in row:
        raise ValueError(
            f"in {origin}: got more cells than columns; expected as many; quote cells that hold "
            "commas"
        )
    cells: dict[str, Any] = {
        name: cell.strip() for name, cell in row.items() if cell and cell.strip()
    }
    try:
        return PromptOptions(**cells)
    except ValidationError as error:
        raise ValueError(explain(error, PromptOptions, origin)) from None
