"""Manifests: lists of clips as CSV, JSONL or Parquet files with the columns of ``Entry``."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import IO, Any, NamedTuple

import numpy as np

from opensora_sp.common.files import atomic_write, open_regular, parse_json


class Entry(NamedTuple):
    """One line: a file, its caption, and its known numbers; ``aspect_ratio`` is height / width."""

    path: Path
    text: str
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    aspect_ratio: float | None = None


REQUIRED = ("path", "text")
NUMBERS = ("num_frames", "height", "width", "fps", "aspect_ratio")
WHOLE = ("num_frames", "height", "width")
# Both are bounds of what a small file may fill memory with.
MAX_LINE, MAX_COLUMNS = 1 << 20, 1000
# Of a Parquet file. Ten numbered paths take a byte where differences are stored and compressed.
MAX_CLIPS_PER_BYTE = 50
# Bytes that the cells of a Parquet file may have, and for each of its own bytes.
MIN_CONTENT, CONTENT_PER_BYTE = 64 << 20, 1000
# Beginnings of captioning models, which Open-Sora 1.3 removes.
VERBS = ("shows", "captures", "features", "depicts", "presents", "is")
PREFIXES = (
    *(f"The video {verb} " for verb in VERBS),
    "In the video, ",
    *(f"The image {verb} " for verb in (*VERBS, "portrays")),
    "In the image, ",
)


class Manifest(Sequence[Entry]):
    """The lines of a manifest, kept by column: each process of a loader has a copy of them.

    Relative paths resolve against the file.

    Args:
        path: ``.csv`` with a header line, ``.jsonl`` with an object a line, or ``.parquet``.
        files: further columns, which have the path of a file in every line.
        remove_prefix: remove beginnings of captions, see ``without_prefix``.

    Raises:
        ValueError: if the file is missing, has another suffix, lacks a column or a path, is empty,
            or a cell of a column of numbers is not a number.
    """

    def __init__(
        self, path: str | Path, files: Sequence[str] = (), *, remove_prefix: bool = False
    ) -> None:
        self.file = Path(path)
        columns = _read_columns(self.file, (*Entry._fields, *files))
        _check_columns(self.file, columns, files)
        self.paths = list(map(str, columns["path"]))
        self.files = {name: list(map(str, columns[name])) for name in files}
        self.texts = [str(cell or "") for cell in columns["text"]]
        if remove_prefix:
            self.texts = [without_prefix(text) for text in self.texts]
        self.numbers = {}
        for name in NUMBERS:
            if name in columns:
                self.numbers[name] = _as_numbers(self.file, name, columns[name], len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Entry:  # type: ignore[override]
        known: dict[str, Any] = {}
        for name, values in self.numbers.items():
            if not math.isnan(values[index]):
                known[name] = int(values[index]) if name in WHOLE else float(values[index])
        return Entry(self.file.parent / self.paths[index], self.texts[index], **known)

    def files_of(self, index: int) -> dict[str, Path]:
        """The paths in the columns ``files`` of a line, by column."""
        return {name: self.file.parent / paths[index] for name, paths in self.files.items()}

    def column(self, name: str) -> np.ndarray:
        """One of the columns of numbers as float64 ``[len(self)]``, NaN where it is not known."""
        return self.numbers.get(name, np.full(len(self), np.nan))

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """For each column that training depends on: its filled cells, of how many, and a digest.

        The digest is the same in every file format. It depends on the order of the lines, and an
        empty column of numbers equals one that is absent.
        """
        summaries = {
            "path": self._summary(len(self), _bytes_of(self.paths)),
            "text": self._summary(sum(map(bool, self.texts)), _bytes_of(self.texts)),
        }
        for name, paths in self.files.items():
            summaries[name] = self._summary(len(self), _bytes_of(paths))
        for name in WHOLE:
            numbers = self.column(name)
            filled = len(numbers) - int(np.isnan(numbers).sum())
            summaries[name] = self._summary(filled, [numbers.tobytes()])
        return summaries

    def _summary(self, filled: int, content: Iterable[bytes]) -> str:
        digest = hashlib.sha256()
        for part in content:
            digest.update(part)
        return f"{filled} of {len(self)} cells, digest {digest.hexdigest()[:16]}"


def _bytes_of(texts: Sequence[str]) -> Iterator[bytes]:
    """The texts and their lengths, so that none can hold what separates it from the next."""
    yield np.fromiter(map(len, texts), np.int64, len(texts)).tobytes()
    for text in texts:
        # JSON can hold characters that UTF-8 cannot.
        yield text.encode("utf-8", "surrogatepass")


def write_manifest(path: str | Path, entries: Iterable[Entry]) -> None:
    """Write a CSV, JSONL or Parquet file, by the suffix of ``path``.

    Paths are kept as they are, unknown numbers are empty cells.

    The file appears under its name when it is complete, and replaces a former one only then.

    Raises:
        ValueError: for another suffix.
    """
    path = Path(path)
    check_suffix(path)
    # A run that reads it meanwhile has the old lines or the new ones.
    with atomic_write(path) as partial:
        _write(partial, [{**entry._asdict(), "path": str(entry.path)} for entry in entries])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, Entry._fields)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def check_suffix(path: Path) -> None:
    """Raise ValueError unless a manifest has the suffix of one of its formats."""
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise _refused(path, "", "a .csv, .jsonl or .parquet file; rename it")


def _refused(path: Path, excess: str, expected: str) -> ValueError:
    """The error of a manifest, with what it has and what is expected."""
    return ValueError(f"got manifest {str(path)!r}{excess}; expected {expected}")


def _check_columns(path: Path, columns: dict[str, list[Any]], files: Sequence[str]) -> None:
    required = (*REQUIRED, *files)
    missing = [name for name in required if name not in columns]
    if missing:
        raise ValueError(
            f"got manifest {str(path)!r} with the columns {list(columns)}; expected "
            f"{' and '.join(required)}; add {' and '.join(missing)}, in CSV to its first line"
        )
    if not columns["path"]:
        raise _refused(path, " without clips", "at least one line; add clips to it")

    for name in required:
        for line, cell in enumerate(columns[name], 1):
            if not isinstance(cell, (str, NoneType)):
                raise ValueError(
                    f"got {name} {str(cell)[:80]!r} for clip {line} of {str(path)!r}; expected "
                    "text; write it in quotes, and one column for each name"
                )
            if not cell and name != "text":
                raise _refused(
                    path,
                    f" without {name} for clip {line}",
                    "a file for each clip; fill it in, or remove the line",
                )


def _read_columns(path: Path, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """The wanted columns; in CSV and JSONL the names of others as well, for messages."""
    if not path.is_file():
        raise ValueError(
            f"got manifest {str(path)!r}, which is not a file; expected a CSV, JSONL or Parquet "
            "file with the columns path,text; check the path, or list the videos of a folder with "
            "opensora-sp index"
        )
    check_suffix(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, wanted)

    try:
        # utf-8-sig: Excel begins UTF-8 with a byte-order mark.
        options = dict(newline="", encoding="utf-8-sig", errors="surrogateescape")
        with open_regular(path, "r", **options) as file:
            lines = _lines(path, file)
            if path.suffix == ".csv":
                reader = csv.DictReader(lines)
                names = reader.fieldnames or []
                _check_names(path, names)
                return _by_column(_within_columns(path, reader), names, wanted)
            rows = (_parsed(path, line) for line in lines if line.strip())
            return _by_column(rows, [], wanted)
    except csv.Error as error:
        raise _refused(
            path,
            f", which cannot be read ({error})",
            f"CSV with cells of at most {csv.field_size_limit():,} characters; save it as that",
        ) from None


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        # Bytes that are not UTF-8 have been decoded to surrogates.
        if not line.isascii() and any("\ud800" <= character <= "\udfff" for character in line):
            raise _refused(
                path, f", of which line {number} is not UTF-8", "UTF-8 alone; save it as that"
            )
        if len(line) > MAX_LINE:
            raise _refused(
                path,
                f" with a line of more than {MAX_LINE:,} characters",
                "at most so many; check that it is a manifest, or shorten the caption",
            )
        yield line


def _check_names(path: Path, names: Sequence[str]) -> None:
    known = Counter(name for name in names if name in Entry._fields)
    repeated = [name for name, times in known.items() if times > 1]
    if repeated:
        raise _refused(
            path, f" with two columns {repeated[0]!r}", "each once; rename or remove the other"
        )
    if len(names) > MAX_COLUMNS:
        raise _refused(
            path,
            f" with {len(names):,} columns",
            f"at most {MAX_COLUMNS:,}; check that it is a manifest, or remove the others",
        )


def _within_columns(path: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, Any]]:
    """Rows without cells beyond the header's, which would be parts of a caption cut at a comma."""
    for row in reader:
        beyond: Any = row.pop(None, ())
        if any(cell.strip() for cell in beyond):
            raise ValueError(
                f"got line {reader.line_num} of {str(path)!r} with {len(row) + len(beyond)} cells, "
                f"the last {beyond[-1][:80]!r}; expected the {len(row)} of the header; put "
                "captions with commas in double quotes"
            )
        yield row


def _by_column(
    rows: Iterable[dict[str, Any]], names: Iterable[str], wanted: Sequence[str]
) -> dict[str, list[Any]]:
    """The ``wanted`` columns; of others in the first line only the names, for messages."""
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(rows):
        if not number:
            columns |= {name: [] for name in row if name not in columns}
        for name in wanted:
            if name in row and name not in columns:
                columns[name] = [None] * number
            if name in columns:
                columns[name].append(row.get(name))
    return columns


def _parsed(path: Path, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line, f"a line of {path}", object_pairs_hook=_without_repetition)
    except ValueError as error:
        row = error
    if not isinstance(row, dict):
        raise ValueError(
            f"got the line {line.strip()[:80]!r} in {str(path)!r}; expected a JSON object with "
            "each name once; correct it"
        )
    return row


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a name is there twice")
    return row


def _read_parquet(path: Path, wanted: Sequence[str]) -> dict[str, list[Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with open_regular(path) as file:
            opened, num_bytes = parquet.ParquetFile(file), os.fstat(file.fileno()).st_size
            metadata = opened.metadata
            # Equal rows take no bytes, but in a manifest each has another path.
            if metadata.num_rows > MAX_CLIPS_PER_BYTE * num_bytes:
                raise _refused(
                    path,
                    f" of {num_bytes:,} bytes, which lists {metadata.num_rows:,} clips",
                    "other paths for all of them; do not use it",
                )
            _check_names(path, opened.schema_arrow.names)
            names = [name for name in wanted if name in opened.schema_arrow.names]
            most = max(MIN_CONTENT, CONTENT_PER_BYTE * num_bytes)
            groups = [metadata.row_group(number) for number in range(opened.num_row_groups)]
            _check_content(path, sum(group.total_byte_size for group in groups), most)

            texts = []
            for name in names:
                kind = opened.schema_arrow.field(name).type
                if pyarrow.types.is_nested(kind):
                    raise ValueError(
                        f"got the column {name!r} of {str(path)!r} of the type {kind}; expected "
                        "text or numbers; write one in each cell"
                    )
                if not pyarrow.types.is_primitive(kind):
                    texts.append(name)
            # A text that many rows share is in memory once.
            table = parquet.ParquetFile(file, read_dictionary=texts).read(names)
            _check_content(path, sum(_num_bytes(table[name]) for name in texts), most)
            return {name: table[name].to_pylist() for name in names}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = f", which cannot be read ({error})"
        raise _refused(path, reason, "Parquet; write it again") from None


def _check_content(path: Path, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise _refused(
            path,
            f" with {num_bytes:,} bytes of cells",
            f"at most {most:,} in a file of this size; do not use it",
        )


def _num_bytes(column: Any) -> int:
    """The bytes of the cells of a column of texts, counted as often as rows have them."""
    from pyarrow import compute, types

    total = 0
    for chunk in column.chunks:
        if types.is_dictionary(chunk.type):
            lengths = compute.binary_length(chunk.dictionary)
            total += compute.sum(lengths.take(chunk.indices), min_count=0).as_py()
        elif not types.is_null(chunk.type):
            total += chunk.nbytes
    return total


def _as_numbers(path: Path, name: str, cells: list[Any], count: int) -> np.ndarray:
    numbers = np.full(count, np.nan)
    for row, cell in enumerate(cells):
        if cell is None or cell == "":
            continue
        try:
            numbers[row] = number = float(cell)
            # NaN passes: it stands for a number that is not known.
            if number < 0 or math.isinf(number) or (name in WHOLE and number % 1 > 0):
                raise ValueError
        except (TypeError, ValueError):
            kind = "a whole number" if name in WHOLE else "a number"
            raise ValueError(
                f"got {name} {cell!r} for clip {row + 1} of {str(path)!r}; expected {kind} >= 0 "
                "or nothing; correct it"
            ) from None
    return numbers


def without_prefix(caption: str) -> str:
    """The caption without a beginning such as "The video shows ", with a capital letter."""
    for prefix in PREFIXES:
        rest = caption[len(prefix) :].strip()
        if rest and caption.startswith((prefix, prefix.lower())):
            return rest[0].upper() + rest[1:]
    return caption
