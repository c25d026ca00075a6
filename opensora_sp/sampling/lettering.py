"""Text in any script on an image: each character from the first installed font that has it, never a
box.

Fonts are matplotlib's DejaVu Sans (Latin, Greek, Cyrillic, Arabic, Hebrew, ...), then those of the
extra ``fonts`` (Chinese, Japanese, Korean), then those of the system. Characters that none of them
has are left out.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import unicodedata
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from PIL import ImageDraw, ImageFont, features

FONT_PACKAGES = ("cvttf_NotoSansCJK_Regular",)  # of the extra "fonts"
SUFFIXES = (".ttf", ".otf", ".ttc")
JOINERS = "\u200c\u200d"  # they shape their neighbours and have no picture
IGNORED = (*JOINERS, "\ufe0e", "\ufe0f")


def drawable(text: str, otherwise: str) -> str:
    """The characters of ``text`` that some font has; ``otherwise`` where no letter, digit or symbol
    is left.
    """
    kept = "".join(
        c if not c.isspace() else " "
        for c in text
        if c.isspace() or c in IGNORED or font_of(c) is not None
    )
    kept = " ".join(kept.split())
    return kept if any(unicodedata.category(c)[0] in "LNS" for c in kept) else otherwise


def draw_text(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, *, size: int) -> None:
    """Write drawable text in black, run by run of characters with the same font, on one baseline."""
    x, top = place
    baseline = top + size
    for path, run in runs(text):
        font = ImageFont.truetype(path, size)
        draw.text((x, baseline), run, fill="black", font=font, anchor="ls")
        x += round(font.getlength(run))


def runs(text: str) -> list[tuple[str, str]]:
    """(font, characters) from left to right; spaces and joiners go with what is before them."""
    fonts: list[str] = []
    for character in text:
        goes_along = fonts and (
            character.isspace() or character in IGNORED or unicodedata.combining(character)
        )
        fonts.append(fonts[-1] if goes_along else font_of(character) or font_files()[0])
    pairs = itertools.groupby(zip(fonts, text), key=lambda pair: pair[0])
    return [(font, "".join(character for _, character in run)) for font, run in pairs]


@cache
def font_of(character: str) -> str | None:
    """The first font that has a character; None if there is none, or it cannot be put into its
    place.
    """
    if unicodedata.bidirectional(character) in ("R", "AL") and not features.check("raqm"):
        return None  # it would be drawn from left to right
    return next((file for file in font_files() if ord(character) in _characters(file)), None)


@lru_cache(maxsize=1)
def font_files() -> list[str]:
    """Font files, the ones looked at first in front."""
    from matplotlib import font_manager

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    first = [str(font_manager.findfont("DejaVu Sans"))]
    for name in FONT_PACKAGES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            first += sorted(
                str(path) for path in Path(found.origin).parent.iterdir() if path.suffix in SUFFIXES
            )
    of_system = sorted(str(path) for path in font_manager.findSystemFonts())
    plain = [
        path for path in of_system if "bold" not in path.lower() and "italic" not in path.lower()
    ]
    return list(dict.fromkeys([*first, *plain, *of_system]))


@cache
def _characters(file: str) -> frozenset[int]:
    """Code points that a font draws in outlines; none of a file that cannot be read, or not be
    drawn with.
    """
    from fontTools.ttLib import TTFont

    try:
        ImageFont.truetype(file, 10)  # FreeType is stricter than fontTools
        font: Any = TTFont(file, fontNumber=0, lazy=True)
        has_outlines = (
            "glyf" in font or "CFF " in font or "CFF2" in font
        )  # pictures of emoji have one size only
        return frozenset(font.getBestCmap() or ()) if has_outlines else frozenset()
    except Exception:  # whatever is wrong with a file of the system
        return frozenset()
