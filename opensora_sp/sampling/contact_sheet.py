"""Contact sheets: frames of each video side by side, its prompt above them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from .lettering import draw_text, drawable

MARGIN, LINE, CELL = 6, 18, 96


def write_contact_sheet(
    path: str | Path, videos: list[tuple[str, np.ndarray]], *, num_frames: int = 8
) -> None:
    """Write a PNG with one strip per (title, frames uint8 ``[F, height, width, 3]``).

    The number of the strip replaces a title that no installed font can draw.
    """
    strips = [
        _strip(drawable(title, f"video {number}"), frames, num_frames)
        for number, (title, frames) in enumerate(videos)
    ]

    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), "white")

    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height

    sheet.save(path)


def shown_frames(available: int, num_frames: int = 8) -> np.ndarray:
    """Indices of frames to show, int ``[<= num_frames]``: evenly spaced, with first and last."""
    return np.unique(np.linspace(0, available - 1, num_frames).round().astype(int))


def _strip(title: str, frames: np.ndarray, num_frames: int) -> Image.Image:
    picked = shown_frames(len(frames), num_frames)
    height, width = frames.shape[1:3]
    cell = (max(1, round(width * CELL / height)), CELL)

    strip_width = MARGIN + len(picked) * (cell[0] + MARGIN)
    strip = Image.new("RGB", (strip_width, LINE + CELL + 2 * MARGIN), "white")
    draw_text(ImageDraw.Draw(strip), (MARGIN, 3), title, size=13)

    for i, index in enumerate(picked):
        image = Image.fromarray(frames[index]).resize(cell, Image.Resampling.BILINEAR)
        strip.paste(image, (MARGIN + i * (cell[0] + MARGIN), LINE + MARGIN))
    return strip
