"""What a choice costs, in arithmetic: which way to take where there are fewer frames, or windows, than ranks."""

from __future__ import annotations

from collections.abc import Sequence

FLOPS_PER_ELEMENT = (
    8000  # computed in the time one number is sent: bf16 at 400 TFLOP/s beside 100 GB/s, one H100
)


def block_flops(tokens: int, width: int) -> float:
    """Forward work of a block on tokens, attention scores left out: 28 C^2 a token with an MLP four times as wide."""
    return 28.0 * width * width * tokens


def attention_flops(rows: int, length: int, width: int) -> float:
    """Forward work of attention over rows of ``length`` tokens."""
    return 4.0 * rows * length * length * width


def few_units_costs(
    unit: int, num_units: int, held: int, width: int, heads: int, ranks: int
) -> dict[str, float]:
    """Cost of one block and its exchanges on the busiest rank, in FLOPs, where few units attend.

    "units" gives whole units to some ranks and none to the others, and switches twice. "heads" shares all token-local
    work and splits the attention alone, and exchanges four activations.

    Args:
        unit: tokens of the largest unit, a frame or a window.
        num_units: how many there are, all samples together.
        held: tokens of the busiest rank where tokens are shared in another layout.
    """
    share = (ranks - 1) / ranks
    of_heads = -(-num_units * heads // ranks)  # units of one head on the busiest rank
    return {
        "units": block_flops(unit, width)
        + attention_flops(1, unit, width)
        + 2 * share * unit * width * FLOPS_PER_ELEMENT,
        "heads": block_flops(held, width)
        + attention_flops(of_heads, unit, width // heads)
        + 4 * share * held * width * FLOPS_PER_ELEMENT,
    }


def few_frames_costs(
    num_samples: int, frames: int, patches: int, width: int, heads: int, ranks: int
) -> dict[str, float]:
    """Cost of a spatial block by whole frames and by frames x heads; see ``few_units_costs``."""
    held = -(-num_samples * patches // ranks) * frames  # in temporal rows
    return few_units_costs(patches, num_samples * frames, held, width, heads, ranks)


def splits_heads(
    num_samples: int, frames: int, patches: int, width: int, heads: int, ranks: int
) -> bool:
    """Whether spatial attention is split by frames x heads while all tokens stay in temporal rows.

    Only where there are fewer spatial rows than ranks, and there where it is cheaper.
    """
    if num_samples % ranks == 0 or num_samples * frames >= ranks:
        return False
    costs = few_frames_costs(num_samples, frames, patches, width, heads, ranks)
    return costs["heads"] < costs["units"]


def splits_windows(
    num_samples: int,
    frames: int,
    patches: int,
    width: int,
    heads: int,
    ranks: int,
    windows: Sequence[int],
) -> bool:
    """Whether attention within windows of these sizes is split by windows x heads while tokens are shared otherwise.

    Only where there are fewer windows than ranks, and there where it is cheaper.
    """
    if num_samples % ranks == 0 or num_samples * len(windows) >= ranks:
        return False
    rows, length = (frames, patches) if num_samples * frames >= ranks else (patches, frames)
    held = -(-num_samples * rows // ranks) * length
    costs = few_units_costs(
        max(windows) * frames, num_samples * len(windows), held, width, heads, ranks
    )
    return costs["heads"] < costs["units"]
