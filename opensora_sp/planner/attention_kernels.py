"""The kernels that attention takes on a GPU that was named, with the packages installed here."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class AttentionKernels:
    """``by_kind`` the choice for spatial, temporal and cross-attention; None where none runs."""

    by_kind: dict[str, Choice | None]

    @classmethod
    def of(
        cls, config: Any, latents: tuple[int, ...], dtype: torch.dtype, platform: Platform
    ) -> AttentionKernels:
        """Those of a model's configuration for latents ``(B, c, frames, height, width)``."""
        num_samples, _, *size = latents
        sequences = config.sequences(config.grid(num_samples, tuple(size)), dtype)
        names = names_by_kind(config.attention)
        return cls({kind: _planned(names[kind], sequences[kind], platform) for kind in names})

    def lines(self) -> list[str]:
        """A sentence for each kind."""
        none = "none (a single token keeps its value)"
        return [f"{LABELS[kind]}: {choice or none}" for kind, choice in self.by_kind.items()]


def _planned(name: str, sequences: Sequences, platform: Platform) -> Choice | None:
    """As a run chooses, which would refuse a kernel that is missing here."""
    if sequences.length == 1 and not sequences.packed:
        return None
    problem = None if name in ("auto", "sdpa") else obstacle(name, sequences, platform)
    if problem is None:
        return choose(name, sequences, platform)
    return Choice(name, f"asked for, but here {problem}")
