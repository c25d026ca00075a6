"""Reads background, colour, shape and direction from frames of a toy clip, without a model.

The captions' words are not used: each answer is the best of all possible ones.

Legend: F frames, S side of a frame in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from opensora_sp.data.toy import COLOURS, DIRECTIONS, MARGIN, SHAPES, ToyClip, distance_to_edge

NAMES = list(COLOURS)
PALETTE = np.array(list(COLOURS.values()), dtype=float)
# The least distance between first and last centroid, as a share of the frame.
LEAST_MOTION = 0.18
# Smaller shapes, as a share of the frame, are not judged.
LEAST_AREA = 0.01
# Width of the templates' edges, as a share of the frame: about that of the demo's autoencoder.
EDGE = 0.1
# The least overlap of a shape and its template: intersection over union, mean over the frames.
LEAST_OVERLAP = 0.6


@dataclass(frozen=True)
class Seen:
    """What frames show; None where that is unclear, as for a shape that does not move."""

    background: str
    colour: str | None
    shape: str | None
    direction: str | None

    @classmethod
    def of(cls, clip: ToyClip) -> Seen:
        """What a clip shows, to compare with."""
        return cls(clip.background, clip.colour, clip.shape, clip.direction)


def judge(frames: np.ndarray) -> Seen:
    """Judge frames uint8 ``[F, S, S, 3]``.

    The background is the colour nearest to the margin's mean; the shape's colour is nearest to most
    of the other pixels. How far a pixel is on the way between the two is its cover. Templates have
    the area and centroid of the shape in each frame, and the one that overlaps most with the cover
    names it. The direction is that of the centroid from the first frame to the last.
    """
    pixels = frames.astype(float)
    background = NAMES[_nearest(border_colour(frames)).item()]

    counts = np.bincount(_nearest(pixels).ravel(), minlength=len(NAMES))
    counts[NAMES.index(background)] = 0
    if not counts.any():
        return Seen(background, None, None, None)

    colour = NAMES[counts.argmax()]
    covers = _covers(pixels, np.array(COLOURS[background]), np.array(COLOURS[colour]))
    masks = covers > 0.5
    if masks.mean((1, 2)).min() < LEAST_AREA:
        return Seen(background, colour, None, None)

    centroids = np.array([np.argwhere(mask).mean(0)[::-1] + 0.5 for mask in masks])  # [F, (x, y)]
    moved = (centroids[-1] - centroids[0]) / frames.shape[1]
    return Seen(background, colour, _shape(covers, centroids), _direction(moved))


def border_colour(frames: np.ndarray) -> np.ndarray:
    """Mean colour ``[3]`` of the margin outside all shapes, over all frames ``[F, S, S, 3]``."""
    edge = max(1, int(frames.shape[1] * MARGIN))
    inner = np.zeros(frames.shape[1:3], dtype=bool)
    inner[edge:-edge, edge:-edge] = True
    return frames[:, ~inner].reshape(-1, 3).mean(0)


def _nearest(colours: np.ndarray) -> np.ndarray:
    """Indices ``[...]`` of the palette's nearest to colours ``[..., 3]``."""
    return np.linalg.norm(colours[..., None, :] - PALETTE, axis=-1).argmin(-1)


def _covers(pixels: np.ndarray, background: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """How far each pixel ``[F, S, S]`` is from background to colour, 0 to 1."""
    way = (colour - background).astype(float)
    return np.clip((pixels - background) @ way / (way @ way), 0, 1)


def _shape(covers: np.ndarray, centroids: np.ndarray) -> str | None:
    overlaps = {
        shape: np.mean([_overlap(shape, *pair) for pair in zip(covers, centroids, strict=True)])
        for shape in SHAPES
    }
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= LEAST_OVERLAP else None


def _overlap(shape: str, cover: np.ndarray, centroid: np.ndarray) -> float:
    """Intersection over union of a frame's cover ``[S, S]`` and the shape's template."""
    area, centre = _unit_shape(shape)
    radius = ((cover > 0.5).sum() / area) ** 0.5
    side = len(cover)
    places = np.arange(side) + 0.5

    x, y = np.meshgrid(*(places - centroid[:, None] + radius * centre[:, None]))
    template = np.clip(0.5 - distance_to_edge(shape, x, y, radius) / (EDGE * side), 0, 1)
    return float(np.minimum(template, cover).sum() / np.maximum(template, cover).sum())


@cache
def _unit_shape(shape: str) -> tuple[float, np.ndarray]:
    """Area of a shape of radius 1, and its centroid (x, y) from its centre."""
    places = (np.arange(400) + 0.5) / 100 - 2
    x, y = np.meshgrid(places, places)
    inside = distance_to_edge(shape, x, y, 1.0) < 0
    return inside.sum() * 1e-4, np.array([x[inside].mean(), y[inside].mean()])


def _direction(moved: np.ndarray) -> str | None:
    along = {name: float(moved @ way) for name, way in DIRECTIONS.items()}
    best = max(along, key=lambda name: along[name])
    return best if along[best] >= LEAST_MOTION else None
