"""The fenced blocks of the documentation, and what they say of themselves.

A block of shell has a comment on the line before it, which neither GitHub nor MkDocs shows:

    <!-- run -->, <!-- run: make test-docs -->    make test-docs runs it
    <!-- not run: REASON -->                      its commands are checked, no more

A block of ``console`` shows commands after ``$`` and what they print, to the letter.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from runs import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
FENCE = re.compile(
    r"(?P<before>[^\n]*\n)?^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^ *```$", re.S | re.M
)
MARK = re.compile(r"<!-- (run|run: make test-docs|not run: \S.*) -->")


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    mark: str | None  # what the comment before it says

    @property
    def runs(self) -> bool:
        return self.mark is not None and self.mark.startswith("run")

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command of one line, without settings of variables.

        Lines that only bash can read (variables, texts over several lines) are left out.
        """
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found = [_words(line) for line in lines if "$" not in line]
        found = [[word for i, word in enumerate(words) if not _sets(words, i)] for words in found]
        return [words for words in found if words]

    @property
    def script(self) -> str:
        """What is given to bash."""
        return (
            "\n".join(map(shlex.join, self.commands)) if self.language == "console" else self.text
        )

    @property
    def printed(self) -> str:
        """What a ``console`` block says its command prints."""
        lines = self.text.replace("\\\n", " ").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("$ "))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that another line closes
        return []


def _sets(words: list[str], place: int) -> bool:
    return all(re.fullmatch(r"[A-Z_]+=.*", word) for word in words[: place + 1])


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page in their order."""
    found = []
    for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
        mark = MARK.fullmatch((fence["before"] or "").strip())
        text = textwrap.dedent(fence["text"])
        found.append(Block(str(page.relative_to(ROOT)), fence["language"], text, mark and mark[1]))
    return found


BLOCKS = list(chain.from_iterable(map(blocks_of, PAGES)))
SHELL = [block for block in BLOCKS if block.language in ("bash", "console")]
