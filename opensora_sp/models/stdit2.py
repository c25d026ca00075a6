"""STDiT2, the spatial-temporal diffusion transformer of Open-Sora 1.1, also part of 1.2.

Reading order: what all STDiT models share (``conditioning.py``, ``base.py``), one block, the model, presets in
``registry.py``.

A block attends over the S patches of a frame, then over the T frames of a patch, then to the text. So it has two
parts, one in spatial and one in temporal rows (``rows.py``). The size of the video conditions the spatial attention and
the MLP, its length and speed the temporal attention.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, V patch volume,
N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import ConditionedModel
from .conditioning import (
    Condition,
    FinalLayer,
    ModulatedBlock,
    SharedConfig,
    Text,
    add_gated,
    modulate,
)
from .layers import (
    CaptionEmbedder,
    PatchEmbed3D,
    PositionEmbedding2D,
    RotaryEmbedding,
    SelfAttention,
    SizeEmbedder,
    TimestepEmbedder,
)
from .token_layout import Rows

TEMPORAL_ENTRIES = (
    6  # of the nine entries of a modulation, where those of the temporal attention begin
)


@dataclass(frozen=True, kw_only=True)
class STDiT2Config(SharedConfig):
    """Constructor arguments; see ``SharedConfig`` for most of them.

    ``input_sq_size`` is the side of the square, in pixels, that the position embedding is scaled to.
    ``qk_norm_legacy`` turns queries and keys before it norms them, as Open-Sora 1.1 did; 1.2 turned that round.
    """

    input_sq_size: int = 32
    qk_norm: bool = False
    qk_norm_legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("input_sq_size")
        if self.hidden_size % 3:
            raise ValueError(
                f"got hidden_size {self.hidden_size}; expected a multiple of 3 (height, width and aspect ratio have a "
                "third of the channels each); choose another hidden_size"
            )


class STDiT2Block(ModulatedBlock):
    """Spatial and temporal self-attention, cross-attention to text, MLP; all but the third modulated (adaLN)."""

    def __init__(self, config: STDiT2Config, rope: RotaryEmbedding) -> None:
        super().__init__(config, qk_norm=config.qk_norm)
        width, heads = config.hidden_size, config.num_heads
        self.norm_temp = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn_temp = SelfAttention(
            width, heads, qk_norm=config.qk_norm, rope=rope, norm_last=config.qk_norm_legacy
        )
        self.scale_shift_table_temporal = nn.Parameter(torch.randn(3, width) / width**0.5)

    def spatial(self, x: Tensor, condition: Condition, keep: Tensor | None = None) -> Tensor:
        """Spatial rows ``[R, S, C]`` -> ``[R, S, C]``; ``keep`` ``[B]`` scales each sample's branch (drop-path)."""
        return self.attend(x, condition, keep)

    def temporal(self, x: Tensor, condition: Condition, keep: Tensor | None = None) -> Tensor:
        """Temporal rows ``[R, T, C]`` -> ``[R, T, C]``; ``keep`` as above."""
        own = self.scale_shift_table_temporal
        shift, scale, gate = condition.entries(own, TEMPORAL_ENTRIES, keep)
        attended = self.attn_temp(
            modulate(self.norm_temp(x), shift, scale), condition.rows, condition.turns
        )
        x = add_gated(x, gate, attended)
        return self.finish(x, condition, keep)


class STDiT2(ConditionedModel):
    """STDiT2 of Open-Sora 1.1: blocks of spatial and temporal attention, for any size, length and speed.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other, or a size is missing.
    """

    Config = STDiT2Config
    config: STDiT2Config
    sample_inputs = ("num_frames", "height", "width", "ar", "fps")
    sharding_points = dict(
        shard="shard",
        switch="switch",
        segment="segment",
        gather="gather",
        spatial="blocks.*.attn",
        temporal="blocks.*.attn_temp",
        rowwise="blocks.*.rowwise",
    )

    def __init__(self, config: STDiT2Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.pos_embed = PositionEmbedding2D(width)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.t_block_temp = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.rope = RotaryEmbedding(width // config.num_heads)
        self.blocks = nn.ModuleList(STDiT2Block(config, self.rope) for _ in range(config.depth))
        self.final_layer = FinalLayer.of(config)
        self.csize_embedder = SizeEmbedder(width // 3)
        self.ar_embedder = SizeEmbedder(width // 3)
        self.fl_embedder = SizeEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)
        starts_at_zero = [
            m for block in self.blocks for m in (block.attn_temp.proj, block.cross_attn.proj)
        ]
        self._initialize(
            embedders=(self.t_embedder, self.t_block, self.t_block_temp, self.y_embedder),
            zero=[self.final_layer.linear, *starts_at_zero],  # so it starts as an image model
        )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor | Text,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        num_frames: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        ar: Tensor | None = None,
        fps: Tensor | None = None,
        *,
        video_mask: Tensor | None = None,
        drop_caption: Tensor | None = None,
        drop_path: Tensor | None = None,
    ) -> Tensor:
        """Predict the noise (and, with ``pred_sigma``, its variance) in noisy latents.

        Args:
            x: latents ``[B, C_in, frames, height, width]``; sizes that the patch does not divide are padded with
                zeros at the end.
            timestep: ``[B]``, 0 (data) to 1000 (noise).
            y: text features ``[B, 1, L, Cy]``, or what ``encode_text`` made of them.
            mask: text tokens in use, ``[B, L]`` (tiled if it has fewer rows). On the CPU, wherever x is, the host waits
                for no device; elsewhere lengths are read back.
            x_mask: bool ``[B, frames]``; False marks frames that are given: they see timestep 0.
            num_frames: frames of the video itself ``[B]``.
            height, width: pixels ``[B]``; the first sample's also set the scale of the position embedding, or with a
                ``video_mask`` each sample's.
            ar: aspect ratio, height / width ``[B]``.
            fps: frames per second ``[B]``; images have 120.
            video_mask: bool ``[B, frames, height, width]``, for clips of different sizes in one batch: False outside of
                a clip. Each clip is treated as if it were alone, and the output outside is zero.
            drop_caption: bool ``[B]``; True takes the null caption instead of y, all its tokens. Best on the CPU, as
                ``mask``.
            drop_path: bool ``[2 * depth, B]`` in order of execution; True skips, for that sample, a block's spatial
                branch (entry 2i) or its temporal and MLP branches (2i + 1), and the kept ones are scaled by
                ``1 / (1 - rate)`` of that depth.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        self._check(x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)
        size, motion = self._embed_sizes(
            len(x), num_frames, height, width, ar, fps
        )  # [B, 1, C] each
        grid = self._grid(x, video_mask, height, width, trained_at=self.config.input_sq_size)
        t = self.t_embedder(self._times(timestep, x_mask))  # [B, m, C]
        modulation = torch.cat(
            [self.t_block(t + size), self.t_block_temp(t + motion)], dim=-1
        )  # [B, m, 9 * C]
        modulation = modulation.unflatten(-1, (9, -1))  # [B, m, 9, C]
        text = self._text(y, mask, drop_caption)
        given = self._given_frames(x_mask)  # [B, T]

        def condition_of(rows: Rows, in_frame: bool) -> Condition:
            return Condition.of(rows, modulation, given, text, rope=None if in_frame else self.rope)

        rows = self.shard(grid)  # spatial rows
        positions = self.pos_embed(rows, x.device).to(self.dtype)  # [1, S, C]
        x = self.x_embedder(self._patches(x, rows)) + positions  # [R, S, C]
        pairs = [(block.spatial, block.temporal) for block in self.blocks]
        x, condition = self.run_pairs(
            pairs, x, condition_of, rows, drop_path
        )  # [R, T, C], temporal rows
        final_t = torch.cat(
            [t[:, :1], t[:, 1:] + size], dim=1
        )  # [B, m, C]: sizes reach given frames only, as released
        x = self.final_layer(x, final_t, condition)  # [R, T, V * C_out]
        return self._leave(x, condition.rows)  # [B, C_out, frames, height, width]

    def _embed_sizes(
        self,
        num_samples: int,
        num_frames: Tensor | None,
        height: Tensor | None,
        width: Tensor | None,
        ar: Tensor | None,
        fps: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of (height, width, aspect ratio) and of (length, speed), ``[B, 1, C]`` each."""
        given = dict(num_frames=num_frames, height=height, width=width, ar=ar, fps=fps)
        if num_frames is None or height is None or width is None or ar is None or fps is None:
            raise ValueError(
                f"got no {', '.join(name for name, size in given.items() if size is None)}; expected one number per "
                f"sample for each of {list(given)}, which STDiT2 is conditioned on; pass them"
            )
        pixels = torch.stack([height, width], dim=1)  # [B, 2]
        size = torch.cat(
            [self.csize_embedder(pixels, num_samples), self.ar_embedder(ar, num_samples)], dim=1
        )
        motion = self.fl_embedder(num_frames, num_samples) + self.fps_embedder(fps, num_samples)
        return size[:, None], motion[:, None]
