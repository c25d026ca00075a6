"""Cases with windows, attention over whole clips, and clips of different sizes in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from parity_cases import Case

from opensora_sp.models.packing import windows_of

Sizes = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class WindowCase(Case):
    heads: int = 2
    head_size: ClassVar[int] = 12
    kernel: tuple[int, int] | None = None
    full: bool = False
    cond: bool = False
    clips: Sizes | None = None  # frames, height and width of each clip of the batch

    @property
    def num_windows(self) -> int:
        lines, columns = (-(-n // p) for n, p in zip(self.size[2:], self.patch[1:], strict=True))
        return len(windows_of(lines, columns, self.kernel).sizes)

    def options(self) -> dict[str, Any]:
        own = super().options() | dict(full_attention=self.full)
        if self.model != "STDiT3":
            return own
        own |= dict(use_cond=self.cond)
        return (
            own
            if self.kernel is None
            else own | dict(kernel_size=(*self.kernel, -1), use_spatial_rope=True)
        )

    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.clips is None:
            return super().pixels()
        height, width = (
            torch.tensor([8.0 * clip[axis] for clip in self.clips], dtype=torch.float64)
            for axis in (1, 2)
        )
        return height, width

    def conditions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.clips is not None:
            found["video_mask"] = video_mask(self)
        if self.cond:
            x, y = inputs["x"].detach(), inputs["y"].detach()
            found.update(cond=torch.sin(3 * x), cond_mask=torch.cos(x), y_null=torch.sin(5 * y))
            found["mask_index"] = [0, self.size[1] - 1]
        return found


MIXED: Sizes = ((3, 5, 6), (5, 8, 3), (1, 2, 2))  # the batch has room for the largest of each


def video_mask(case: WindowCase) -> torch.Tensor:
    """Bool ``[B, frames, height, width]``: where the clips of a batch are."""
    mask = torch.zeros(case.size, dtype=torch.bool)
    for of_clip, (frames, height, width) in zip(mask, case.clips or (), strict=True):
        of_clip[:frames, :height, :width] = True
    return mask
