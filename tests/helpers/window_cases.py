"""Cases with windows, attention over whole clips, and clips of different sizes in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from family_parity import BLOCKS, FamilyCase
from parity_cases import drawn
from parity_cases import make_inputs as plain_inputs

from opensora_sp.models import build_model
from opensora_sp.models.token_groups import windows_of

Sizes = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class WindowCase(FamilyCase):
    model: str = "STDiT3"
    heads: int = 2
    kernel: tuple[int, int] | None = None
    full: bool = False
    cond: bool = False
    clips: Sizes | None = None  # frames, height and width of each clip of the batch

    @property
    def num_windows(self) -> int:
        lines, columns = (-(-n // p) for n, p in zip(self.size[2:], self.patch[1:], strict=True))
        return len(windows_of(lines, columns, self.kernel).sizes)

    def build(self) -> torch.nn.Module:
        return make_model(self)

    def inputs(self) -> dict[str, Any]:
        return make_inputs(self)

    def options(self) -> dict[str, Any]:
        own: dict[str, Any] = {"full_attention": self.full}
        if self.model == "STDiT":
            return own | dict(input_size=self.size[1:], space_scale=0.5)
        if self.model == "STDiT2":
            return own | dict(qk_norm=True)
        own |= dict(input_sq_size=16, use_cond=self.cond)
        return (
            own
            if self.kernel is None
            else own | dict(kernel_size=(*self.kernel, -1), use_spatial_rope=True)
        )


MIXED: Sizes = ((3, 5, 6), (5, 8, 3), (1, 2, 2))  # the batch has room for the largest of each


def make_model(case: WindowCase) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(
        case.model,
        in_channels=2,
        hidden_size=12 * case.heads,
        depth=BLOCKS,
        num_heads=case.heads,
        patch_size=case.patch,
        caption_channels=5,
        model_max_length=6,
        mlp_ratio=2.0,
        drop_path=0.3,
        **case.options(),
    ).double()
    return drawn(model, case)


def video_mask(case: WindowCase) -> torch.Tensor:
    """Bool ``[B, frames, height, width]``: where the clips of a batch are."""
    mask = torch.zeros(case.size, dtype=torch.bool)
    for of_clip, (frames, height, width) in zip(mask, case.clips or (), strict=True):
        of_clip[:frames, :height, :width] = True
    return mask


def make_inputs(case: WindowCase) -> dict[str, Any]:
    inputs: dict[str, Any] = plain_inputs(case)
    samples = torch.arange(case.size[0], dtype=torch.float64)
    if case.clips is not None:
        inputs["video_mask"] = video_mask(case)
        inputs["height"], inputs["width"] = (
            torch.tensor([8.0 * clip[axis] for clip in case.clips], dtype=torch.float64)
            for axis in (1, 2)
        )
    if case.cond:
        inputs["cond"], inputs["cond_mask"] = (
            torch.sin(3 * inputs["x"].detach()),
            torch.cos(inputs["x"].detach()),
        )
        inputs.update(mask_index=[0, case.size[1] - 1], y_null=torch.sin(5 * inputs["y"].detach()))
    sizes = {name: inputs.pop(name) for name in ("fps", "height", "width")}
    if case.model == "STDiT2":
        inputs.update(sizes, num_frames=16 + samples, ar=sizes["height"] / sizes["width"] + samples)
    return inputs if case.model != "STDiT3" else inputs | sizes
