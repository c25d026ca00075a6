"""Contact sheets: frames of each video side by side, its prompt above them.

The font is matplotlib's DejaVu Sans, which has Latin, Greek, Cyrillic, Arabic and Hebrew.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

MARGIN, LINE, CELL = 6, 18, 96
SHOWN_FRAMES = 8


def write_contact_sheet(path: str | Path, videos: list[tuple[str, np.ndarray]]) -> None:
    """Write a PNG with one strip per (title, frames uint8 ``[F, height, width, 3]``).

    The number of the strip replaces a title that the font cannot draw.
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
    """The characters of ``text`` that the font has; ``otherwise`` if no letter or digit is left."""
    known = _characters()
    kept = [character for character in text if character.isspace() or ord(character) in known]
    has_words = any(character.isalnum() for character in kept)
    return " ".join("".join(kept).split()) if has_words else otherwise


def draw_text(
    draw: ImageDraw.ImageDraw, position: tuple[int, int], text: str, *, size: int
) -> None:
    """Draw a line in black; ``text`` is a result of ``drawable``."""
    left, top = position
    font = ImageFont.truetype(_font_file(), size)
    draw.text((left, top + size), text, fill="black", font=font, anchor="ls")


@cache
def _font_file() -> str:
    from matplotlib import font_manager

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return str(font_manager.findfont("DejaVu Sans"))


@cache
def _characters() -> frozenset[int]:
    """Code points that the font has."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(_font_file()).get_charmap())


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
