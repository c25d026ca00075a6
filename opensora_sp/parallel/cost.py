"""What a choice costs, in arithmetic: which way to take where there are fewer frames than ranks."""

from __future__ import annotations

FLOPS_PER_ELEMENT = 8000  # computed in the time one number is sent: bf16 at 400 TFLOP/s beside 100 GB/s, one H100


def block_flops(tokens: int, width: int) -> float:
    """Forward work of a block on tokens, attention scores left out: 28 C^2 a token with an MLP four times as wide."""
    return 28.0 * width * width * tokens


def attention_flops(rows: int, length: int, width: int) -> float:
    """Forward work of attention over rows of ``length`` tokens."""
    return 4.0 * rows * length * length * width


def pair_flops(num_samples: int, frames: int, patches: int, width: int) -> float:
    """Forward work of a spatial and a temporal block on a batch."""
    return (
        block_flops(2 * num_samples * frames * patches, width)
        + attention_flops(num_samples * frames, patches, width)
        + attention_flops(num_samples * patches, frames, width)
    )


def few_rows_costs(num_samples: int, frames: int, patches: int, width: int, heads: int, ranks: int) -> dict[str, float]:
    """Cost of one spatial block and its exchanges on the busiest rank, in FLOPs, for the two ways of ``splits_heads``.

    "rows" gives whole spatial rows to some ranks and none to the others, and switches twice. "heads" shares all
    token-local work and splits the attention alone, and exchanges four activations.
    """
    share = (ranks - 1) / ranks
    held = -(-num_samples * patches // ranks) * frames  # tokens of the busiest rank in temporal rows
    units = -(-num_samples * frames * heads // ranks)
    return {
        "rows": block_flops(patches, width)
        + attention_flops(1, patches, width)
        + 2 * share * patches * width * FLOPS_PER_ELEMENT,
        "heads": block_flops(held, width)
        + attention_flops(units, patches, width // heads)
        + 4 * share * held * width * FLOPS_PER_ELEMENT,
    }


def splits_heads(num_samples: int, frames: int, patches: int, width: int, heads: int, ranks: int) -> bool:
    """Whether spatial attention is split by rows x heads while all tokens stay in temporal rows.

    Only where there are fewer spatial rows than ranks, and there where it is cheaper.
    """
    if num_samples % ranks == 0 or num_samples * frames >= ranks:
        return False
    costs = few_rows_costs(num_samples, frames, patches, width, heads, ranks)
    return costs["heads"] < costs["rows"]
