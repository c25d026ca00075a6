"""Contact sheets: frames of each video side by side, its prompt above them.

A title is drawn in one font: matplotlib's DejaVu Sans (Latin, Greek, Cyrillic, Arabic, Hebrew), or
Noto Sans CJK of the extra ``fonts`` (Chinese, Japanese, Korean, Latin).
"""

from __future__ import annotations

import importlib.util
import logging
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps, features

FONT_PACKAGE = "cvttf_NotoSansCJK_Regular"  # of the extra "fonts"
MARGIN, LINE, CELL = 6, 18, 96
SHOWN_FRAMES = 8


def write_contact_sheet(path: str | Path, videos: list[tuple[str, np.ndarray]]) -> None:
    """Write a PNG with one strip per (title, frames uint8 ``[F, height, width, 3]``).

    The number of the strip replaces a title that no font can draw.
    """
    strips = []
    for number, (title, frames) in enumerate(videos):
        strips.append(_strip(drawable(title, f"video {number}"), frames))

    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path)


def shown_frames(available: int) -> np.ndarray:
    """Indices of frames to show, int ``[<= 8]``: evenly spaced, with first and last."""
    return np.unique(np.linspace(0, available - 1, SHOWN_FRAMES).round().astype(int))


def drawable(text: str, otherwise: str) -> str:
    """The characters of ``text`` in its font; ``otherwise`` if no letter or digit is left."""
    known = characters(font_of(text))
    # Without libraqm, Pillow draws right-to-left scripts from left to right.
    reversed_scripts = () if features.check("raqm") else ("R", "AL")

    kept = []
    for character in text:
        is_known = character.isspace() or ord(character) in known
        if is_known and unicodedata.bidirectional(character) not in reversed_scripts:
            kept.append(character)
    has_words = any(character.isalnum() for character in kept)
    return " ".join("".join(kept).split()) if has_words else otherwise


def draw_text(
    draw: ImageDraw.ImageDraw, position: tuple[int, int], text: str, *, size: int
) -> None:
    """Draw a line in black; ``text`` is a result of ``drawable``."""
    left, top = position
    font = ImageFont.truetype(font_of(text), size)
    draw.text((left, top + size), text, fill="black", font=font, anchor="ls")


def font_of(text: str) -> str:
    """The font with most of a text's characters."""
    # Of equally good ones the first, DejaVu.
    return max(font_files(), key=lambda file: sum(ord(c) in characters(file) for c in text))


@cache
def font_files() -> list[str]:
    """Installed font files."""
    from matplotlib import font_manager

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    files = [str(font_manager.findfont("DejaVu Sans"))]
    package = importlib.util.find_spec(FONT_PACKAGE)
    if package is not None and package.origin is not None:
        files += sorted(map(str, Path(package.origin).parent.glob("*.[to]t[cf]")))
    return files


@cache
def characters(file: str) -> frozenset[int]:
    """Code points that a font has."""
    from fontTools.ttLib import TTFont

    return frozenset(TTFont(file, fontNumber=0, lazy=True).getBestCmap())


def _strip(title: str, frames: np.ndarray) -> Image.Image:
    height, width = frames.shape[1:3]
    cell = (max(1, round(width * CELL / height)), CELL)
    cells = []
    for frame in frames[shown_frames(len(frames))]:
        image = Image.fromarray(frame).resize(cell, Image.Resampling.BILINEAR)
        cells.append(np.asarray(ImageOps.expand(image, (MARGIN, 0, 0, 0), "white")))

    # Left, top, right, bottom.
    border = (0, LINE + MARGIN, MARGIN, MARGIN)
    strip = ImageOps.expand(Image.fromarray(np.hstack(cells)), border, "white")
    draw_text(ImageDraw.Draw(strip), (MARGIN, 3), title, size=13)
    return strip
