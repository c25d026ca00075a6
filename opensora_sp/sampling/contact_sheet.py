"""Contact sheets: frames of each video side by side, its prompt above them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from .lettering import draw_text, drawable

MARGIN, LINE, CELL = 6, 18, 96
SHOWN_FRAMES = 8


def write_contact_sheet(path: str | Path, videos: list[tuple[str, np.ndarray]]) -> None:
    """Write a PNG with one strip per (title, frames uint8 ``[F, height, width, 3]``).

    The number of the strip replaces a title that no installed font can draw.
    """
    strips = [
        _strip(drawable(title, f"video {number}"), frames)
        for number, (title, frames) in enumerate(videos)
    ]

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
