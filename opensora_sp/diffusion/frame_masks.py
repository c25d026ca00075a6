"""Frame masks of training: which frames of a clip are conditioning frames, and which are predicted.

The strategies are those of Open-Sora 1.1 and 1.2. A mask is bool ``[T]``: True for frames that are
noised and predicted, False for conditioning frames. A model trained with them can extend, loop and
interpolate videos. Random numbers come from the caller's generator, never from global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from opensora_sp.common.importing import nearest

STRATEGIES = (
    *("identity", "random", "interpolate"),
    *("quarter_random", "quarter_head", "quarter_tail", "quarter_head_tail"),
    *("image_random", "image_head", "image_tail", "image_head_tail"),
)
# Names in the releases; those of 1.1 have a prefix.
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
        ValueError: for unknown names, two names of one strategy, ratios that are no numbers in [0,
            1], or a sum over 1.
    """
    checked: dict[str, float] = {}
    for name, ratio in ratios.items():
        strategy = strategy_named(name)
        if strategy in checked:
            raise ValueError(
                f"got mask_ratios with two names of the strategy {strategy!r}; expected each "
                "strategy once; add the ratios up"
            )
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise ValueError(
                f"got mask_ratios[{name!r}] = {ratio!r}; expected a number from 0 to 1; change it"
            )
        checked[strategy] = float(ratio)

    total = math.fsum(checked.values())
    if total > 1 + 1e-6:
        raise ValueError(
            f"got mask_ratios that sum to {total:g}; expected at most 1 (the rest is "
            "'identity', no conditioning frames); lower some"
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
