"""Prompts, their notation (references in braces, texts of loops), prompt files, and scores."""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opensora_sp.common.files import or_shipped, parse_json, read_small_file
from opensora_sp.config import InferenceConfig
from opensora_sp.config.draft import explain
from opensora_sp.config.sections import PromptOptions

from .reference_frames import Insertion, parse_mask_strategy

# Windows editors begin UTF-8 with a byte order mark, which is not part of the first prompt.
ENCODING = "utf-8-sig"
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Prompt:
    """A caption and the conditioning of its video.

    Attributes:
        text: the caption, possibly one for each loop (``prompt_of_loop``).
        reference_path: files, separated by ``;``.
        mask_strategy: where their frames are placed (``parse_mask_strategy``). By default the first
            frame of the first file is the first frame of the video.
    """

    text: str
    reference_path: str | None = None
    mask_strategy: str | None = None

    @property
    def references(self) -> list[Path]:
        parts = (self.reference_path or "").split(";")
        return [Path(part.strip()) for part in parts if part.strip()]

    @property
    def insertions(self) -> list[Insertion]:
        default = "0" if self.references else ""
        return parse_mask_strategy(default if self.mask_strategy is None else self.mask_strategy)


def parse_prompt(
    text: str, reference_path: str | None = None, mask_strategy: str | None = None
) -> Prompt:
    """Parse ``'a cat{"reference_path": "cat.png", "mask_strategy": "0"}'``, as in Open-Sora 1.2.

    Args:
        reference_path, mask_strategy: defaults for prompts without them.

    Raises:
        ValueError: if the braces are not a JSON object of these two keys.
    """
    caption, brace, rest = text.partition("{")
    options: dict[str, str | None] = {
        "reference_path": reference_path,
        "mask_strategy": mask_strategy,
    }

    if brace:
        try:
            given = parse_json(brace + rest, "the prompt")
            if set(given) - set(options) or not all(isinstance(v, str) for v in given.values()):
                raise ValueError
            options |= given
        except ValueError:
            raise ValueError(
                f"got prompt {text!r}; expected text, then at most a JSON object with the texts "
                "reference_path and mask_strategy; correct what stands in braces"
            ) from None

    return Prompt(caption.strip(), **options)


def prompt_of_loop(prompt: str, loop: int) -> str:
    """The text of one loop: ``"|0|a cat|2|a dog"`` is a cat from loop 0 on, a dog from loop 2 on.

    Prompts without ``|`` at the start hold for all loops.

    Raises:
        ValueError: if a number is missing or none is 0.
    """
    if not prompt.startswith("|"):
        return prompt
    parts = prompt[1:].split("|")
    numbers, texts = parts[0::2], parts[1::2]
    are_numbers = all(re.fullmatch(r"\s*\d+\s*", number) for number in numbers)
    if len(numbers) != len(texts) or not are_numbers or int(numbers[0]) != 0:
        raise ValueError(
            f"got prompt {prompt!r}; expected '|0|first|2|from loop 2 on', numbers and texts in "
            "turn from 0 on; correct it, or start it with another sign than |"
        )
    begun = [text for number, text in zip(numbers, texts, strict=True) if int(number) <= loop]
    return begun[-1]


def read_prompts(path: str | Path) -> list[PromptOptions]:
    """Prompts of a .txt file (one per line) or a .csv file; lines without a prompt are skipped.

    A .csv file has a column ``prompt`` (or ``text``), and optionally others with the names of
    ``PromptOptions``. Empty cells take the config's value.

    Raises:
        ValueError: if the file is missing, of another kind, without prompts, has invalid values, or
            has more than ``MAX_BYTES``.
    """
    path = or_shipped(path)
    if not path.is_file() or path.suffix not in (".txt", ".csv"):
        raise ValueError(
            f"got prompts {str(path)!r}, which is not a file of prompts; expected a .txt or .csv; "
            "check the path, or rename it"
        )

    try:
        text = read_small_file(path, MAX_BYTES, "a prompts file").decode(ENCODING)
        parsed = _rows(path, text) if path.suffix == ".csv" else _lines(text)
        prompts = list(parsed)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"got prompts file {str(path)!r}, which cannot be read ({error}); expected UTF-8; save "
            "it as that"
        ) from None

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


# Scores in a prompt: aesthetics, motion and camera, worded as in training Open-Sora 1.2 or 1.3

# Scores in words, by their lower bounds.
AESTHETIC_WORDS = {
    -math.inf: "terrible",
    4: "very poor",
    4.5: "poor",
    5: "fair",
    5.5: "good",
    6: "very good",
    6.5: "excellent",
}
MOTION_WORDS = {
    -math.inf: "very low",
    0.5: "low",
    2: "fair",
    5: "high",
    10: "very high",
    20: "extremely high",
}
Sentences = Mapping[str, str | None]
"""By the phrase that a prompt may have itself: a sentence, None for none."""


def with_scores(cfg: InferenceConfig, prompt: str) -> str:
    """Append the config's scores to the text of each loop of a prompt.

    They are written as in training Open-Sora 1.2 or, with ``score_style`` "words", 1.3.
    A score that the prompt states itself is kept.
    """
    sentences = _in_words(cfg) if cfg.score_style == "words" else _in_numbers(cfg)
    scored = functools.partial(_with_sentences, sentences=sentences)

    if not prompt.startswith("|"):
        return scored(prompt)

    # "|0|a cat|2|a dog" -> "", "|0|", "a cat", "|2|", "a dog"
    empty, *parts = re.split(r"(\|\s*\d+\s*\|)", prompt)
    texts = [part if i % 2 == 0 else scored(part.strip()) for i, part in enumerate(parts)]
    return "".join([empty, *texts])


def _in_words(cfg: InferenceConfig) -> Sentences:
    aesthetic, motion = _graded(cfg.aes, AESTHETIC_WORDS), _graded(cfg.flow, MOTION_WORDS)
    camera = cfg.camera_motion
    return {
        "aesthetic score is": aesthetic and f"The aesthetic score is {aesthetic}",
        "motion strength is": motion and f"The motion strength is {motion}",
        "camera motion:": camera and f"camera motion: {camera}",
    }


def _in_numbers(cfg: InferenceConfig) -> Sentences:
    values = {
        "aesthetic score:": None if cfg.aes is None else f"{float(cfg.aes):.1f}",
        "motion score:": None if cfg.flow is None else f"{float(cfg.flow):.1f}",
        "camera motion:": cfg.camera_motion,
    }
    return {name: None if score is None else f"{name} {score}" for name, score in values.items()}


def _with_sentences(text: str, sentences: Sentences) -> str:
    """The text with those sentences at the end whose phrase it does not have."""
    for phrase, sentence in sentences.items():
        if sentence is not None and phrase not in text:
            text += f" {sentence}."
    return text


def _graded(score: float | str | None, words: dict[float, str]) -> str | None:
    """The word of the highest bound that a score reaches; texts that are no numbers stay."""
    if score is None:
        return None
    try:
        reached = [word for bound, word in words.items() if float(score) >= bound]
    except ValueError:
        return str(score)
    return reached[-1]
