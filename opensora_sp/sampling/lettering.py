"""Text in any script on an image: each character from the first installed font that has it.

Fonts are matplotlib's DejaVu Sans (Latin, Greek, Cyrillic, Arabic, Hebrew, ...), then those of the
extra ``fonts`` (Chinese, Japanese, Korean), then those of the system. Characters that no font has
are dropped, not drawn as a box.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import re
import unicodedata
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from PIL import ImageDraw, ImageFont, features

FONT_PACKAGE = "cvttf_NotoSansCJK_Regular"  # of the extra "fonts"
# Zero-width characters that shape their neighbours and have no glyph of their own.
JOINERS = "\u200c\u200d"
IGNORED = (*JOINERS, "\ufe0e", "\ufe0f")


def drawable(text: str, otherwise: str) -> str:
    """The characters of ``text`` that have a font; ``otherwise`` if only punctuation is left."""
    can_draw = [c.isspace() or c in IGNORED or font_of(c) is not None for c in text]
    kept = " ".join("".join(itertools.compress(text, can_draw)).split())
    return kept if any(unicodedata.category(c)[0] in "LNS" for c in kept) else otherwise


def draw_text(
    draw: ImageDraw.ImageDraw, position: tuple[int, int], text: str, *, size: int
) -> None:
    """Draw text in black on one baseline; ``text`` is a result of ``drawable``."""
    x, top = position
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
    """The first font that has a character; None if none has, or its script cannot be laid out."""
    # Without libraqm, Pillow draws right-to-left scripts from left to right.
    if unicodedata.bidirectional(character) in ("R", "AL") and not features.check("raqm"):
        return None
    return next((file for file in font_files() if ord(character) in _characters(file)), None)


@lru_cache(maxsize=1)
def font_files() -> list[str]:
    """Font files, in the order in which they are searched."""
    from matplotlib import font_manager

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

    first = [str(font_manager.findfont("DejaVu Sans"))]
    package = importlib.util.find_spec(FONT_PACKAGE)
    if package is not None and package.origin is not None:
        first += sorted(map(str, Path(package.origin).parent.glob("*.[to]t[cf]")))

    # Upright fonts of regular weight come before bold and italic ones.
    of_system = sorted(str(path) for path in font_manager.findSystemFonts())
    plain = [path for path in of_system if not re.search("bold|italic", path.lower())]
    return list(dict.fromkeys([*first, *plain, *of_system]))


@cache
def _characters(file: str) -> frozenset[int]:
    """Code points that a font draws as outlines; empty for a font that cannot be used."""
    from fontTools.ttLib import TTFont

    # Files of the system may be damaged in any way, and FreeType is stricter than fontTools.
    try:
        ImageFont.truetype(file, 10)
        font: Any = TTFont(file, fontNumber=0, lazy=True)

        # Bitmap fonts (emoji) have one size only.
        has_outlines = any(table in font for table in ("glyf", "CFF ", "CFF2"))
        return frozenset(font.getBestCmap() or ()) if has_outlines else frozenset()
    except Exception:
        return frozenset()
