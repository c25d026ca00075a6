"""STDiT, the spatial-temporal diffusion transformer of Open-Sora 1.0 (and, with frame masks, of its 1.2 code).

Reading order: what all STDiT models share (``conditioning.py``, ``base.py``), one block, the model, presets in
``registry.py``.

A block attends over the S patches of a frame, then over the T frames of a patch, then to the text. So it has two
parts, one in spatial and one in temporal rows (``rows.py``). Positions are tables for one latent size.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, V patch volume,
N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .base import ConditionedModel
from .conditioning import GATE, Condition, FinalLayer, ModulatedBlock, SharedConfig, Text, add_gated
from .layers import (
    CaptionEmbedder,
    PatchEmbed3D,
    SelfAttention,
    TimestepEmbedder,
    frame_position_embedding,
    position_embedding,
)
from .token_layout import Rows


@dataclass(frozen=True, kw_only=True)
class STDiTConfig(SharedConfig):
    """Constructor arguments; see ``SharedConfig`` for most of them.

    ``input_size`` is the only latent size (frames, height, width) that the model takes. Its patches' coordinates are
    divided by ``space_scale``, those of its frames by ``time_scale``.
    """

    rotary = False

    input_size: tuple[int, int, int] = (1, 32, 32)
    space_scale: float = 1.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "input_size", tuple(self.input_size))
        self._check_positive("space_scale", "time_scale")
        sizes = self.input_size
        if len(sizes) != 3 or any(
            n < 1 or n % patch for n, patch in zip(sizes, self.patch_size, strict=True)
        ):
            raise ValueError(
                f"got input_size {sizes} and patch_size {self.patch_size}; expected (frames, height, width) of latents "
                "in whole patches; round input_size, or take STDiT2 or STDiT3, which pad"
            )


class STDiTBlock(ModulatedBlock):
    """Spatial and temporal self-attention, cross-attention to text, MLP; modulated by the timestep (adaLN).

    The temporal attention has no norm of its own, and takes over the gate of the spatial one: on all frames that of
    the sample's timestep.
    """

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__(config, qk_norm=False)
        self.attn_temp = SelfAttention(config.hidden_size, config.num_heads, qk_norm=False)

    def spatial(self, x: Tensor, condition: Condition, keep: Tensor | None = None) -> Tensor:
        """Spatial rows ``[R, S, C]`` -> ``[R, S, C]``; ``keep`` ``[B]`` scales each sample's branch (drop-path)."""
        return self.attend(x, condition, keep)

    def temporal(
        self,
        x: Tensor,
        condition: Condition,
        keep: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Temporal rows ``[R, T, C]`` -> ``[R, T, C]``; ``positions`` ``[1, T, C]`` of the frames, for attention."""
        table = self.scale_shift_table[GATE : GATE + 1]
        (gate,) = condition.entries(table, GATE, keep, ignore_mask=True)
        attended = self.attn_temp(x if positions is None else x + positions, condition.rows)
        return self.finish(add_gated(x, gate, attended), condition, keep)


class STDiT(ConditionedModel):
    """STDiT of Open-Sora 1.0: blocks of spatial and temporal attention, text by cross-attention, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiTConfig
    config: STDiTConfig
    sharding_points = dict(
        shard="shard",
        switch="switch",
        segment="segment",
        gather="gather",
        spatial="blocks.*.attn",
        temporal="blocks.*.attn_temp",
        rowwise="blocks.*.rowwise",
    )
    pos_embed: Tensor
    pos_embed_temporal: Tensor

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        for name, table in self.position_tables().items():
            self.register_buffer(name, table)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.blocks = nn.ModuleList(STDiTBlock(config) for _ in range(config.depth))
        self.final_layer = FinalLayer.of(config)
        starts_at_zero = [
            m for block in self.blocks for m in (block.attn_temp.proj, block.cross_attn.proj)
        ]
        self._initialize(
            embedders=(self.t_embedder, self.t_block, self.y_embedder),
            zero=[self.final_layer.linear, *starts_at_zero],  # so it starts as an image model
        )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor | Text,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        *,
        video_mask: Tensor | None = None,
        drop_caption: Tensor | None = None,
        drop_path: Tensor | None = None,
    ) -> Tensor:
        """Predict the noise (and, with ``pred_sigma``, its variance) in noisy latents.

        Args:
            x: latents ``[B, C_in, frames, height, width]`` of the configured ``input_size``.
            timestep: ``[B]``, 0 (data) to 1000 (noise).
            y: text features ``[B, 1, L, Cy]``, or what ``encode_text`` made of them.
            mask: text tokens in use, ``[B, L]`` (tiled if it has fewer rows). On the CPU, wherever x is, the host waits
                for no device; elsewhere lengths are read back.
            x_mask: bool ``[B, frames]``; False marks frames that are given: they see timestep 0.
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
        self._check_size(x)
        grid = self._grid(x, video_mask)
        t = self.t_embedder(self._times(timestep, x_mask))  # [B, m, C]
        modulation = self.t_block(t).unflatten(-1, (6, -1))  # [B, m, 6, C]
        text = self._text(y, mask, drop_caption)
        given = self._given_frames(x_mask)  # [B, T]

        def condition_of(rows: Rows, in_frame: bool) -> Condition:
            return Condition.of(rows, modulation, given, text)

        rows = self.shard(grid)  # spatial rows
        x = (
            self.x_embedder(self._patches(x, rows)) + self.pos_embed[0, rows.patches(x.device)]
        )  # [R, S, C]
        pairs = [(block.spatial, block.temporal) for block in self.blocks]
        pairs[0] = (
            self.blocks[0].spatial,
            partial(self.blocks[0].temporal, positions=self.pos_embed_temporal),
        )
        x, condition = self.run_pairs(
            pairs, x, condition_of, rows, drop_path
        )  # [R, T, C], temporal rows
        x = self.final_layer(x, t, condition)  # [R, T, V * C_out]
        return self._leave(x, condition.rows)  # [B, C_out, frames, height, width]

    def position_tables(self) -> dict[str, Tensor]:
        """The tables of a frame's patches, ``[1, S, C]``, and of the frames, ``[1, T, C]``, by buffer name."""
        sizes = zip(self.config.input_size, self.config.patch_size, strict=True)
        _, rows, columns = (
            (torch.arange(n // patch) / self.config.space_scale).double() for n, patch in sizes
        )
        frames = torch.arange(
            self.config.input_size[0] // self.config.patch_size[0], dtype=torch.float64
        )
        tables = {
            "pos_embed": frame_position_embedding(rows, columns, self.config.hidden_size),
            "pos_embed_temporal": position_embedding(
                frames / self.config.time_scale, self.config.hidden_size
            ),
        }
        return {name: table.float()[None] for name, table in tables.items()}

    def _check_size(self, x: Tensor) -> None:
        if tuple(x.shape[2:]) != self.config.input_size:
            raise ValueError(
                f"got latents of size {tuple(x.shape[2:])}; expected the input_size {self.config.input_size} that this "
                "STDiT has position tables for; build it with another input_size, or take STDiT2 or STDiT3"
            )
