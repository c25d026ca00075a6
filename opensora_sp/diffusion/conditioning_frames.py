"""Conditioning frames in training Open-Sora 1.3: which ones, and what of the conditions is dropped.

A micro-batch has the same conditioning frames in all clips. Other than with a frame mask
(``frame_masks.py``), these frames are noised and predicted as well, and given to the model beside
its input. Random numbers come from the caller's generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from opensora_sp.common.importing import nearest

NOISY = "_noisy"
KINDS = (
    *("none", "i2v", "i2v_head", "i2v_tail", "i2v_loop"),
    *("v2v_head", "v2v_head_noisy", "v2v_tail", "other", "other_noisy"),
)
DROPS = ("cond", "text", "null", "keep")


@dataclass(frozen=True)
class DrawnCondition:
    """The condition of a micro-batch.

    Attributes:
        index: numbers of the conditioning frames.
        drops_frames, drops_text: whether the model gets no latents of these frames (their places
            stay), or no captions.
        noise: standard deviation of the noise in their latents.
    """

    index: tuple[int, ...]
    drops_frames: bool = False
    drops_text: bool = False
    noise: float = 0.0


def conditioning_frames(kind: str, num_frames: int, rng: np.random.Generator) -> list[int]:
    """Numbers of the conditioning frames of a kind, ascending; "none" has none.

    "i2v" and "i2v_head" have the first frame, "i2v_tail" the last, "i2v_loop" both; "v2v_head" and
    "v2v_tail" a half; "other" those before or after a random frame. The ending "_noisy" says that
    their latents are noised, and changes no numbers.

    Raises:
        ValueError: for an unknown kind, or "other" of fewer than 3 frames.
    """
    _check_names({kind: 1.0}, KINDS, "mask_types")
    kind, last = kind.removesuffix(NOISY), num_frames - 1
    if kind == "other":
        if num_frames < 3:
            raise ValueError(
                f"got the mask type 'other' for {num_frames} latent frames; expected at least 3; "
                "take longer clips, or another type"
            )
        is_head = bool(rng.integers(0, 1, endpoint=True))
        edge = int(rng.integers(1, num_frames - 2, endpoint=True))
        return list(range(edge) if is_head else range(edge, num_frames))

    frames: dict[str, list[int]] = {
        "none": [],
        "i2v": [0],
        "i2v_head": [0],
        "i2v_tail": [last],
        "i2v_loop": sorted({0, last}),
        "v2v_head": list(range(num_frames // 2)),
        "v2v_tail": list(range(num_frames // 2, num_frames)),
    }
    return frames[kind]


def draw_condition(
    kinds: Mapping[str, float],
    drops: Mapping[str, float] | None,
    num_frames: int,
    rng: np.random.Generator,
) -> DrawnCondition:
    """Draw the condition of a micro-batch; images and very short clips have none.

    The latents of noisy kinds have noise of a log-normal deviation, as images in Stable Video
    Diffusion (Blattmann et al., 2023).

    Args:
        kinds: weight of each of ``KINDS``.
        drops: weight of each of ``DROPS``; None drops nothing. "cond" keeps the frames alone,
            "text" the captions alone, "null" neither.
        num_frames: F, latent frames.
    """
    kind, drop = _draw(kinds, rng), "keep" if drops is None else _draw(drops, rng)
    noise = float(np.exp(rng.normal(-3.0, 0.5)))
    if num_frames < 3:
        return DrawnCondition(())
    return DrawnCondition(
        index=tuple(conditioning_frames(kind, num_frames, rng)),
        drops_frames=drop in ("text", "null"),
        drops_text=drop in ("cond", "null"),
        noise=noise if kind.endswith(NOISY) else 0.0,
    )


def check_mask_types(weights: Mapping[str, float]) -> None:
    """Raise ValueError for unknown kinds, or weights that are not positive in sum."""
    _check_names(weights, KINDS, "mask_types")


def check_drop_condition(weights: Mapping[str, float] | None) -> None:
    """Raise ValueError for unknown names, or weights that are not positive in sum."""
    if weights is not None:
        _check_names(weights, DROPS, "scheduler.drop_condition")


def _check_names(weights: Mapping[str, float], known: tuple[str, ...], key: str) -> None:
    for name, weight in weights.items():
        if name not in known:
            raise ValueError(
                f"got {name!r} in {key}; expected one of {list(known)}; {nearest(name, known)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
            raise ValueError(
                f"got {key}[{name!r}] = {weight!r}; expected a weight of at least 0; change it"
            )
    if not sum(weights.values()) > 0:
        raise ValueError(f"got {key} {dict(weights)}; expected a weight above 0; raise one")


def _draw(weights: Mapping[str, float], rng: np.random.Generator) -> str:
    """One of the names, with probabilities as their weights."""
    total = sum(weights.values())
    return str(rng.choice(list(weights), p=[weight / total for weight in weights.values()]))
