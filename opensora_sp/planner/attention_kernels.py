"""The kernels that attention takes on a GPU that was named, with the packages installed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from opensora_sp.models.attention_table import (
    LABELS,
    Choice,
    Platform,
    Sequences,
    choose,
    names_by_kind,
    obstacle,
)

Kernels = Mapping[str, Choice | None]  # of spatial, temporal and cross-attention


def attention_kernels(
    config: Any, latents: tuple[int, ...], dtype: torch.dtype, platform: Platform, *, triton: bool
) -> Kernels:
    """The kernel of each kind of attention that a model has; None where none runs.

    Args:
        latents: ``(B, c, frames, height, width)``.
        triton: whether Triton kernels may run, once the GPU has verified them.
    """
    num_samples, _, *size = latents
    names = names_by_kind(config.attention)
    found = {}
    for kind, one in config.sequences(config.grid(num_samples, tuple(size)), dtype).items():
        found[kind] = _planned(names[kind], replace(one, short_rows=triton), platform)
    return found


def describe_kernels(kernels: Kernels) -> list[str]:
    """A line for each kind of attention."""
    none = "none (a single token keeps its value)"
    return [f"{LABELS[kind]}: {choice or none}" for kind, choice in kernels.items()]


def _planned(name: str, sequences: Sequences, platform: Platform) -> Choice | None:
    """As a run chooses, which would refuse a kernel that is missing here."""
    if sequences.length == 1 and not sequences.packed:
        return None
    problem = None if name in ("auto", "sdpa") else obstacle(name, sequences, platform)
    if problem is None:
        return choose(name, sequences, platform)
    return Choice(name, f"asked for, but here {problem}")
