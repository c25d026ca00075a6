"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2.

Reading order: what all STDiT models share (``conditioning.py``), one block, the model, presets in ``registry.py``.

Tokens are rows (``rows.py``): a spatial block attends over the S patches of a frame, a temporal block over the T
frames of a patch, and everything else acts on single tokens. The model says where tokens enter (``shard``), change
layout (``switch``) and leave (``gather``), and knows nothing of who holds which rows.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .conditioning import Condition, ConditionedModel, FinalLayer, ModulatedBlock, SharedConfig, Text
from .layers import (
    CaptionEmbedder,
    PatchEmbed3D,
    PositionEmbedding2D,
    RotaryEmbedding,
    SizeEmbedder,
    TimestepEmbedder,
)
from .rows import PatchGrid, Rows

DEFAULT_FPS = 24.0


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(SharedConfig):
    """Constructor arguments; see ``SharedConfig`` for most of them.

    ``input_sq_size`` is the side of the square, in pixels, that the position embedding is scaled to.
    ``skip_y_embedder`` expects text already projected and packed.
    """

    input_sq_size: int = 512
    model_max_length: int = 300
    qk_norm: bool = True
    skip_y_embedder: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("input_sq_size")


class STDiT3Block(ModulatedBlock):
    """Self-attention over a row, cross-attention to text, MLP; the first and last modulated by the timestep (adaLN)."""

    def __init__(self, config: STDiT3Config, rope: RotaryEmbedding | None = None) -> None:
        super().__init__(config, qk_norm=config.qk_norm, rope=rope)

    def forward(self, x: Tensor, condition: Condition, keep: Tensor | None = None) -> Tensor:
        """Rows ``[R, L, C]`` -> ``[R, L, C]``; ``keep`` ``[B]`` scales each sample's branches (drop-path)."""
        return self.finish(self.attend(x, condition, keep), condition, keep)


class STDiT3(ConditionedModel):
    """STDiT3 of Open-Sora 1.2: pairs of a spatial and a temporal block, text by cross-attention, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiT3Config
    config: STDiT3Config
    sample_inputs = ("fps", "height", "width")
    sharding_points = dict(
        shard="shard",
        switch="switch",
        segment="segment",
        gather="gather",
        spatial="spatial_blocks.*.attn",
        temporal="temporal_blocks.*.attn",
        rowwise="*_blocks.*.rowwise",
    )

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.pos_embed = PositionEmbedding2D(width)
        self.rope = RotaryEmbedding(width // config.num_heads)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.spatial_blocks = nn.ModuleList(STDiT3Block(config) for _ in range(config.depth))
        self.temporal_blocks = nn.ModuleList(STDiT3Block(config, rope=self.rope) for _ in range(config.depth))
        self.final_layer = FinalLayer.of(config)
        starts_at_zero = [m for b in self.temporal_blocks for m in (b.attn.proj, b.cross_attn.proj, b.mlp.fc2)]
        self._initialize(
            embedders=(self.t_embedder, self.fps_embedder, self.t_block, self.y_embedder),
            zero=[self.final_layer.linear, *starts_at_zero],  # so it starts as an image model
        )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor | Text,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        fps: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        *,
        drop_caption: Tensor | None = None,
        drop_path: Tensor | None = None,
    ) -> Tensor:
        """Predict the velocity (and, with ``pred_sigma``, a second set of channels) of noisy latents.

        Args:
            x: latents ``[B, C_in, frames, height, width]``; sizes that the patch does not divide are padded with
                zeros at the end.
            timestep: ``[B]``, 0 (data) to 1000 (noise).
            y: text features ``[B, 1, L, Cy]``, or what ``encode_text`` made of them; with ``skip_y_embedder`` projected
                and packed ``[1, N, C]``.
            mask: text tokens in use, ``[B, L]`` (tiled if it has fewer rows); with ``skip_y_embedder`` lengths ``[B]``.
            x_mask: bool ``[B, frames]``; False marks frames that are given: they see timestep 0.
            fps: frames per second ``[B]``, 24 where absent.
            height, width: pixels ``[B]``; set the scale of the position embedding by the first sample's value, and
                where absent that scale is 1 (a square of ``input_sq_size``).
            drop_caption: bool ``[B]``; True takes the null caption instead of y, all its tokens.
            drop_path: bool ``[2 * depth, B]`` in order of execution; True skips a block's modulated branches for that
                sample, and the kept ones are scaled by ``1 / (1 - rate)`` of that depth.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        self._check(x, timestep, y, mask, x_mask, drop_caption, drop_path)
        grid = PatchGrid.of(x, self.config.patch_size)
        fps = timestep.new_full((1,), DEFAULT_FPS) if fps is None else fps
        t = self.t_embedder(self._times(timestep, x_mask))  # [B, m, C]
        t = t + self.fps_embedder(fps, len(x))[:, None]  # [B, m, C]
        modulation = self.t_block(t).unflatten(-1, (6, -1))  # [B, m, 6, C]
        text = self._text(y, mask, drop_caption)
        given = self._given_frames(x_mask)  # [B, T]
        trained_at = self.config.input_sq_size

        def condition_of(rows: Rows) -> Condition:
            return Condition.of(rows, modulation, given, text.tokens, text.lengths, text.keys)

        rows = self.shard(grid)  # spatial rows
        patches = rows.slice(x).to(self.dtype)  # [R, S, V * C_in]
        positions = self.pos_embed.of_rows(rows, height, width, trained_at=trained_at, device=x.device)  # [1, S, C]
        x = self.x_embedder(patches) + positions.to(self.dtype)  # [R, S, C]
        pairs = list(zip(self.spatial_blocks, self.temporal_blocks, strict=True))
        x, condition = self.run_pairs(pairs, x, condition_of, rows, drop_path)  # [R, T, C], temporal rows
        x = self.final_layer(x, t, condition)  # [R, T, V * C_out]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.gather(x, condition.rows)  # [B, C_out, frames, height, width]

    def _embed_text(self, y: Tensor, mask: Tensor | None, drop: Tensor | None) -> tuple[Tensor, list[int]]:
        if self.config.skip_y_embedder:
            assert mask is not None
            return y.flatten(0, 1).to(self.dtype), mask.tolist()
        return super()._embed_text(y, mask, drop)

    def _check_text(self, n: int, y: Tensor, mask: Tensor | None, drop_caption: Tensor | None) -> None:
        if not self.config.skip_y_embedder:
            super()._check_text(n, y, mask, drop_caption)
        elif mask is None or drop_caption is not None:
            raise ValueError(
                "got no mask, or drop_caption, with skip_y_embedder; expected packed text with its lengths as mask; "
                "drop captions before packing"
            )
