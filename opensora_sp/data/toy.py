"""Toy clips: coloured shapes that move over a plain background, with captions.

Clip ``i`` of a seed is always the same; any two indices are independent draws.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 60, 190),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle")
# Share of the frame that shapes keep away from its edges.
MARGIN = 0.02
DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "down": (0.0, 1.0), "up": (0.0, -1.0)}


@dataclass(frozen=True)
class ToyClip:
    """Content of a toy clip; positions and lengths are shares of the frame, speed is per clip."""

    shape: str
    colour: str
    background: str
    direction: str
    start: tuple[float, float]
    radius: float
    speed: float

    @property
    def caption(self) -> str:
        moving = f"a {self.colour} {self.shape} moving {self.direction}"
        return f"{moving} on a {self.background} background"

    def draw(self, num_frames: int, size: int) -> np.ndarray:
        """Frames ``[num_frames, size, size, 3]`` uint8, RGB, with soft edges one pixel wide."""
        centres = (np.arange(size) + 0.5) / size
        x, y = np.meshgrid(centres, centres)
        colour = np.array(COLOURS[self.colour], dtype=np.float64)
        background = np.array(COLOURS[self.background], dtype=np.float64)

        frames = []
        for moved in np.linspace(0, self.speed, num_frames):
            dx, dy = (d * moved for d in DIRECTIONS[self.direction])
            right, below = x - self.start[0] - dx, y - self.start[1] - dy
            outside = distance_to_edge(self.shape, right, below, self.radius)
            cover = np.clip(0.5 - outside * size, 0, 1)[..., None]
            frames.append(np.rint(cover * colour + (1 - cover) * background))
        return np.stack(frames).astype(np.uint8)


def distance_to_edge(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Distance to a shape's edge at offsets from its centre, negative inside; y points down."""
    distance: np.ndarray
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "square":
        distance = np.maximum(abs(x), abs(y)) - 0.9 * radius
    else:
        sides = 0.894 * abs(x) - 0.447 * y - 0.55 * radius
        distance = np.maximum(y - 0.8 * radius, sides)
    return distance


def toy_captions() -> list[str]:
    """The captions of all clips that can be drawn."""
    captions = []
    for (colour, background), shape, direction in product(
        permutations(COLOURS, 2), SHAPES, DIRECTIONS
    ):
        clip = ToyClip(shape, colour, background, direction, start=(0, 0), radius=0, speed=0)
        captions.append(clip.caption)
    return captions


def is_held_out(caption: str) -> bool:
    """True for the eighth of all captions that toy training sets do not have."""
    return zlib.crc32(caption.encode()) % 8 == 0


def toy_clip(seed: int, index: int) -> ToyClip:
    """Draw clip ``index`` of a seed; the shape moves outwards and stays inside the frame."""
    rng = np.random.Generator(np.random.Philox(key=[seed, index]))
    colour, background = rng.permutation(list(COLOURS))[:2]
    direction = str(rng.choice(list(DIRECTIONS)))
    radius, speed = rng.uniform(0.205, 0.215), rng.uniform(0.28, 0.3)

    # From near the middle outwards: the place of a shape already shows its direction.
    across = 0.5 + rng.uniform(-0.05, 0.05)
    along = 0.45 + rng.uniform(-0.01, 0.01)
    horizontal, forward = direction in ("left", "right"), direction in ("right", "down")
    along = along if forward else 1 - along
    start = (along, across) if horizontal else (across, along)
    return ToyClip(
        shape=str(rng.choice(SHAPES)),
        colour=str(colour),
        background=str(background),
        direction=direction,
        start=start,
        radius=radius,
        speed=speed,
    )
