"""Counter-based randomness: every draw has a key (seed, purpose, counters).

The same key gives the same numbers in every process, whatever was drawn before. Keys have no rank
and no worker. So runs with another ``sp_size`` or world size see the same data, noise and
timesteps, and resuming needs no saved generator state.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The generator of one key, e.g. ``generator(42, "noise", step, sample_id)``."""
    entropy = [seed, zlib.crc32(purpose.encode()), *counters]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def normal(shape: tuple[int, ...], seed: int, purpose: str, *counters: int) -> Tensor:
    """Standard normal numbers, float32, on the CPU."""
    return torch.from_numpy(
        generator(seed, purpose, *counters).standard_normal(shape, dtype=np.float32)
    )


def uniform(seed: int, purpose: str, *counters: int) -> float:
    """One number in [0, 1)."""
    return float(generator(seed, purpose, *counters).random())
