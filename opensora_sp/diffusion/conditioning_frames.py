"""Conditioning frames in training: which frames are given, and what of the conditions is dropped.

Open-Sora 1.1 and 1.2 mask frames of each clip (``frame_mask``). A mask is bool ``[T]``: True for
frames that are noised and predicted, False for conditioning frames. A model trained with them can
extend, loop and interpolate videos.

In Open-Sora 1.3 a micro-batch has the same conditioning frames in all clips (``draw_condition``).
They are noised and predicted as well, and are further inputs of the model.

Random numbers come from the caller's generator, never from global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opensora_sp.common.importing import nearest

STRATEGIES = (
    *("identity", "random", "interpolate"),
    *("quarter_random", "quarter_head", "quarter_tail", "quarter_head_tail"),
    *("image_random", "image_head", "image_tail", "image_head_tail"),
)
# Names in the releases; in 1.1 they have a prefix.
ALIASES = {"intepolate": "interpolate", "no": "identity"}
PREFIX = "mask_"


def strategy_named(name: str) -> str:
    """The strategy behind a name of Open-Sora 1.1 ("mask_no", "mask_image_head"), 1.2
    ("intepolate") or ours.

    Raises:
        ValueError: for an unknown name, naming the nearest known one.
    """
    plain = str(name).removeprefix(PREFIX)
    plain = ALIASES.get(plain, plain)
    if plain not in STRATEGIES:
        raise ValueError(
            f"got the mask strategy {name!r} in mask_ratios; expected one of {list(STRATEGIES)}; "
            f"{nearest(plain, STRATEGIES)}"
        )
    return plain


def check_mask_ratios(ratios: Mapping[str, float]) -> dict[str, float]:
    """The ratios by strategy, in the order given.

    Raises:
        ValueError: for unknown names, two names of one strategy, ratios outside of [0, 1], or a sum
            over 1.
    """
    checked: dict[str, float] = {}
    for name, ratio in ratios.items():
        strategy = strategy_named(name)
        if strategy in checked:
            raise ValueError(
                f"got mask_ratios with two names of the strategy {strategy!r}; expected each "
                "strategy once; add the ratios up"
            )
        checked[strategy] = float(ratio)

    total = math.fsum(checked.values())
    if not total <= 1 + 1e-6 or min(checked.values(), default=0.0) < 0:
        raise ValueError(
            f"got mask_ratios {dict(ratios)} that sum to {total:g}; expected numbers from 0 to 1, "
            "of at most 1 in sum (the rest is 'identity', no conditioning frames); change some"
        )
    return checked


def draw_frame_mask(
    ratios: Mapping[str, float], num_frames: int, rng: np.random.Generator
) -> Tensor:
    """Draw a mask, bool ``[T]``: one number picks the strategy, which then draws its own.

    Args:
        ratios: probability of each strategy; the rest is "identity".
        num_frames: T, latent frames (of patches).
        rng: for example ``generator(seed, "frame_mask", micro_batch, sample)``.
    """
    # One number, whatever the ratios are.
    drawn, cumulative = rng.random(), 0.0
    for strategy, ratio in check_mask_ratios(ratios).items():
        cumulative += ratio
        if drawn < cumulative:
            return frame_mask(strategy, num_frames, rng)
    return frame_mask("identity", num_frames, rng)


def frame_mask(strategy: str, num_frames: int, rng: np.random.Generator) -> Tensor:
    """The mask of a strategy, bool ``[T]``, True for predicted frames; at least one frame is.

    Conditioning frames are: for "identity" none; for "quarter_*" 1 to T // 4 and for "image_*" one,
    at the "head", the "tail", both, or a "random" position; for "interpolate" every second frame;
    for "random" each frame with a probability drawn from 0.1 to 0.9. A single frame is predicted.

    Open-Sora fails for quarters of 2 or 3 frames, and predicts no frame for head and tail of 2.
    Here a quarter is at least one frame, and if no frame would be predicted, the last one is.
    """
    strategy, T = strategy_named(strategy), num_frames
    mask = torch.ones(T, dtype=torch.bool)
    if T <= 1 or strategy == "identity":
        return mask

    kind, _, where = strategy.partition("_")
    if kind == "random":
        probability = 0.1 + 0.8 * rng.random()
        mask = torch.tensor([rng.random() > probability for _ in range(T)])
    elif kind == "interpolate":
        mask[rng.integers(0, 1, endpoint=True) :: 2] = False
    else:
        size = 1 if kind == "image" else rng.integers(1, max(1, T // 4), endpoint=True)
        if where == "random":
            start = rng.integers(0, T - size, endpoint=True)
            mask[start : start + size] = False
        if where in ("head", "head_tail"):
            mask[:size] = False
        if where in ("tail", "head_tail"):
            mask[T - size :] = False

    if not mask.any():
        mask[-1] = True
    return mask


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

    Args:
        num_frames: at least 3 for "other".
    """
    kind, last = kind.removesuffix(NOISY), num_frames - 1
    if kind == "other":
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
    # Drawn for all kinds, so that these do not shift later draws.
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
    for name in weights:
        if name not in known:
            raise ValueError(
                f"got {name!r} in {key}; expected one of {list(known)}; {nearest(name, known)}"
            )
    if not sum(weights.values()) > 0 or min(weights.values()) < 0:
        raise ValueError(
            f"got {key} {dict(weights)}; expected weights of at least 0, and one above; change them"
        )


def _draw(weights: Mapping[str, float], rng: np.random.Generator) -> str:
    """One of the names, with probabilities as their weights."""
    total = sum(weights.values())
    return str(rng.choice(list(weights), p=[weight / total for weight in weights.values()]))
