"""Positions of tokens: sines and cosines that are added, and rotary embeddings of queries and keys.

Legend: B samples, R rows, L tokens of a row, T frames, S patches of a frame, C hidden width,
H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opensora_sp.common.tensors import to_device

from .functions import rotate
from .token_layout import Rows


def position_angles(positions: Tensor, per_position: Tensor) -> Tensor:
    """``positions[..., None] * per_position`` in at least float32."""
    dtype = torch.promote_types(positions.dtype, torch.float32)
    return positions.to(dtype)[..., None] * per_position.to(dtype)


def frequencies(width: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """``[width / 2]``, from 1 down to 1 / 10000."""
    return 1.0 / 10000 ** (torch.arange(0, width, 2, device=device).to(dtype) / width)


def position_embedding(positions: Tensor, width: int) -> Tensor:
    """Positions ``[...]`` -> ``[..., width]``: sines, then cosines, in the positions' dtype."""
    angles = position_angles(positions, frequencies(width, positions.dtype, positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def frame_position_embedding(height: Tensor, width: Tensor, channels: int) -> Tensor:
    """Coordinates of a frame's rows ``[H]`` and columns ``[W]`` -> ``[H * W, channels]``.

    The first half of the channels encodes the column, the second the row.
    """
    assert channels % 4 == 0, channels
    row, column = torch.meshgrid(height, width, indexing="ij")
    halves = [position_embedding(axis.flatten(), channels // 2) for axis in (column, row)]
    return torch.cat(halves, dim=-1)


class PositionEmbedding2D(nn.Module):
    """Sine-cosine embedding of a patch's column and row, scaled to the resolution trained at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, rows: Rows, device: torch.device) -> Tensor:
        """Of the patches of the local rows, float32 ``[1, S, C]`` or ``[R, 1, C]``.

        With a mask each clip lies on a grid of the clip's size: ``[R, S, C]`` or ``[R, 1, C]``.
        """
        grid, scale = rows.grid, rows.scale(device)
        patches, columns = rows.patches(device), grid.shape[2]  # [1, S] or [R, 1]
        # Height and width in patches, of all samples or of each.
        sizes = [grid.shape[1:]] if grid.mask is None else grid.mask.frame_sizes()

        halves = []
        for axis, coordinates in ((1, patches % columns), (0, patches // columns)):
            steps = [round((size[0] * size[1]) ** 0.5) / size[axis] for size in sizes]
            step: float | Tensor = steps[0]
            if grid.mask is not None:
                samples = rows.samples(device)
                step = to_device(torch.tensor(steps), device)[samples][:, None]  # [R, 1]
            halves.append(position_embedding(coordinates / scale * step, self.width // 2))
        return torch.cat(halves, dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding over the frames (Su et al., 2021).

    Neighbouring channels are pairs, which are rotated by an angle.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.freqs = nn.Parameter(frequencies(head_width, torch.float32), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Casting a model leaves the frequencies in float32.

        Rounded ones would turn long rows by wrong angles.
        """
        exact = self.freqs.data
        super()._apply(fn, recurse)
        if exact.is_meta:
            exact = frequencies(self.head_width, torch.float32, self.freqs.device)
        self.freqs.data = exact.to(self.freqs.device)
        return self

    def forward(self, q: Tensor, rotation: Tensor) -> Tensor:
        """Rotate queries or keys ``[R, L, H, D]``."""
        return rotate(q, rotation)

    def rotation(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """Cosine and sine for each channel of queries and keys, ``[2, 1 or R, 1 or L, 1, D]``.

        ``in_frame``: for attention within a frame, not over frames.
        """
        angles = self.angles(rows, in_frame, device)[:, :, None]
        # The first channel of a pair takes minus the sine of the second.
        angles = torch.stack([-angles, angles], dim=-1).flatten(-2)
        return torch.stack([angles.cos(), angles.sin()])

    def angles(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """``[1 or R, 1 or L, D/2]``, by the frame."""
        # All would be the same.
        assert not in_frame
        return position_angles(rows.frames(device), self.freqs)


class RotaryEmbedding3D(RotaryEmbedding):
    """Rotary position embedding of Open-Sora 1.3: frame, line and column have a third of the
    channels each.

    Within a frame, frames are at 0. Over frames, lines and columns are counted within their window.
    Distances of lines and columns follow the resolution (``PatchGrid.scale``).
    """

    def __init__(self, head_width: int) -> None:
        super().__init__(head_width // 3)

    def rotation(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            # Only where a strategy has other rows attend. The cache would be guarded.
            return super().rotation(rows, in_frame, device)
        key = ("rotation", rows.layout, rows.start, rows.stop, in_frame)
        compute = super().rotation
        return rows.grid.cached(key, lambda: compute(rows, in_frame, device))

    def angles(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """``[1 or R, L, D/2]``."""
        patch, columns = rows.patches(device), rows.grid.shape[2]
        frame, line, column = rows.frames(device), patch // columns, patch % columns
        if in_frame:
            frame = torch.zeros_like(frame)
        elif rows.grid.kernel is not None:
            height, width = rows.grid.kernel
            line = line % height if height > 0 else line
            column = column % width if width > 0 else column

        scale = rows.scale(device)
        axes = torch.broadcast_tensors(frame.to(scale), line / scale, column / scale)
        return torch.cat([position_angles(axis, self.freqs) for axis in axes], dim=-1)
