"""Files of weights that attack whoever loads them, and the mark by which that shows."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn


class WritesWhenLoaded(nn.Module):
    """As a TorchScript archive, it creates the file ``path`` when it is loaded (CVE-2025-32434)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.weight = torch.ones(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        self.weight = torch.from_file(state[0], True, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class RunsWhenUnpickled:
    """As a pickle, it creates the folder ``mark`` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def write_torchscript(file: Path, mark: Path) -> None:
    """Write an archive to ``file``, which creates ``mark`` when torch loads it."""
    torch.jit.script(WritesWhenLoaded(str(mark))).save(str(file))


def check_torchscript_attacks(file: Path, mark: Path) -> None:
    """Assert that ``torch.load`` would create ``mark``, so that its absence shows something."""
    torch.load(file, weights_only=False)
    assert mark.exists()
    mark.unlink()
