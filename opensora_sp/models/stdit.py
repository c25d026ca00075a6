"""STDiT of Open-Sora 1.0 and STDiT2 of 1.1, spatial-temporal diffusion transformers.

With frame masks STDiT is also the STDiT of Open-Sora's 1.2 code, of which STDiT2 is a part, too.

Reading order: this file, ``base.py``, ``blocks.py``, ``layers.py``, ``conditions.py``. A block
attends over the S patches of a frame, then over the T frames of a patch, then to the text. So it
has two parts, one in spatial and one in temporal rows (``token_layout.py``). Positions of STDiT are
tables for one latent size. In STDiT2, the size of the video conditions the spatial attention and
the MLP, its length and speed the temporal attention.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R local
rows, L tokens of a row (S or T), V patch volume, m modulation states of a sample (1, or 2 with
conditioning frames).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import MODEL_POINTS, ConditionedModel, PassCounts
from .block_cache import BlockCache
from .blocks import FinalLayer, STDiT2Block, STDiTBlock
from .conditions import ENTRIES, Condition, Conditioning, Text
from .input_checks import check_input_size, check_inputs, check_sample_numbers
from .layers import CaptionEmbedder, PatchEmbed3D, SizeEmbedder, TimestepEmbedder
from .positions import (
    PositionEmbedding2D,
    RotaryEmbedding,
    frame_position_embedding,
    position_embedding,
)
from .stdit_config import STDiT2Config, STDiTConfig
from .token_layout import SPATIAL, TEMPORAL, Rows

# Without its temporal and text branches, a model begins as an image model.
ZERO_INITIALIZED = ("final_layer.linear", "blocks.*.attn_temp.proj", "blocks.*.cross_attn.proj")


class TwoPartModel(ConditionedModel):
    """Base of the models whose blocks have a spatial and a temporal part."""

    sharding_points = MODEL_POINTS | dict(
        spatial="blocks.*.attn", temporal="blocks.*.attn_temp", tokenwise="blocks.*.tokenwise"
    )
    blocks: nn.ModuleList

    def run_blocks(
        self, x: Tensor, rows: Rows, conditioning: Conditioning, drop_path: Tensor | None
    ) -> tuple[Tensor, Condition]:
        """All blocks, from spatial rows ``[R, S, C]`` to temporal rows ``[R, T, C]``.

        Returns the condition of the temporal rows as well.
        """
        scales = self.branch_scales(drop_path)
        blocks: list[Any] = list(self.blocks)
        for i, block in enumerate(blocks):
            condition = conditioning.of(SPATIAL, rows)
            x = self.run_part(block.spatial, x, condition, scales[2 * i])
            x, rows = self.switch(x, rows)  # [R, T, C], temporal rows

            last = i + 1 == len(blocks)
            condition, further = conditioning.of(TEMPORAL, rows), self.temporal_inputs(i)
            x = self.run_part(block.temporal, x, condition, scales[2 * i + 1], *further, last=last)
            if not last:
                x, rows = self.switch(x, rows)  # [R, S, C], spatial rows
        return x, condition

    def temporal_inputs(self, number: int) -> tuple[Tensor | None, ...]:
        """Further inputs of the temporal part of a block."""
        return ()


class STDiT(TwoPartModel):
    """STDiT of Open-Sora 1.0: blocks of spatial and temporal attention, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiTConfig
    config: STDiTConfig
    pass_counts = PassCounts(23, 27, 60), PassCounts(116, 102, 64)
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
        self.final_layer = FinalLayer(config)

        self.initialize(
            embedders=(self.t_embedder, self.t_block, self.y_embedder),
            zero=ZERO_INITIALIZED,
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
        block_cache: BlockCache | None = None,
    ) -> Tensor:
        """Predict the noise (and, with ``pred_sigma``, its variance) in noisy latents.

        Args:
            x: latents ``[B, C_in, frames, height, width]`` of the configured ``input_size``.
            timestep, y, mask, x_mask, video_mask, drop_caption, block_cache: see
                ``ConditionedModel``.
            drop_path: bool ``[2 * depth, B]``, see ``ConditionedModel``. Entry 2i skips a block's
                spatial branch, entry 2i + 1 its temporal and MLP branches.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        check_inputs(self.config, x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)
        check_input_size(self.config, x)

        # The timestep and the text condition all tokens.
        t = self.t_embedder(self.timesteps(timestep, x_mask))  # [B, m, C]
        conditioning = Conditioning(
            self.t_block(t).unflatten(-1, (6, -1)),  # [B, m, 6, C]
            self.conditioning_frames(x_mask),  # [B, T]
            self.embed_text(y, mask, drop_caption),
            at_once=ENTRIES,
        )

        # Embed the patches of the local spatial rows.
        rows = self.shard(self.patch_grid(x, video_mask))
        x = self.x_embedder(self.patchify(x, rows))  # [R, L, C]
        x = x + self.pos_embed[0, rows.patches(x.device)]

        run_blocks = self.blocks_runner(block_cache)
        x, condition = run_blocks(x, rows, conditioning, drop_path)
        x = self.final_layer(x, t, condition)  # [R, T, V * C_out]
        return self.unpatchify(x, condition.rows)  # [B, C_out, frames, height, width]

    def temporal_inputs(self, number: int) -> tuple[Tensor | None, ...]:
        # The first block adds the positions of frames.
        return (None if number else self.pos_embed_temporal,)

    def position_tables(self) -> dict[str, Tensor]:
        """Tables of a frame's patches ``[1, S, C]`` and of the frames ``[1, T, C]``, by name."""
        config, width = self.config, self.config.hidden_size
        sizes = zip(config.input_size, config.patch_size, strict=True)
        frames, lines, columns = (torch.arange(size // patch) for size, patch in sizes)

        lines, columns = lines / config.space_scale, columns / config.space_scale
        space = frame_position_embedding(lines.double(), columns.double(), width)
        time = position_embedding(frames.double() / config.time_scale, width)
        return {"pos_embed": space.float()[None], "pos_embed_temporal": time.float()[None]}


class STDiT2(TwoPartModel):
    """STDiT2 of Open-Sora 1.1: as STDiT, for any size, length and speed.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other, or a
            number of the samples is missing.
    """

    Config = STDiT2Config
    config: STDiT2Config
    pass_counts = PassCounts(44, 36, 140), PassCounts(146, 110, 140)
    sample_inputs = ("num_frames", "height", "width", "ar", "fps")

    def __init__(self, config: STDiT2Config) -> None:
        super().__init__(config)
        self.switch.before_modulation = True
        width = config.hidden_size
        self.pos_embed = PositionEmbedding2D(width)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.t_block_temp = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.rope = RotaryEmbedding(width // config.num_heads)
        self.blocks = nn.ModuleList(STDiT2Block(config, self.rope) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.csize_embedder = SizeEmbedder(width // 3)
        self.ar_embedder = SizeEmbedder(width // 3)
        self.fl_embedder = SizeEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)

        self.initialize(
            embedders=(self.t_embedder, self.t_block, self.t_block_temp, self.y_embedder),
            zero=ZERO_INITIALIZED,
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
        block_cache: BlockCache | None = None,
    ) -> Tensor:
        """Predict the noise (and, with ``pred_sigma``, its variance) in noisy latents.

        Args:
            x, timestep, y, mask, x_mask, video_mask, drop_caption, block_cache: see
                ``ConditionedModel``.
            num_frames: frames of the video itself ``[B]``, before encoding.
            height, width: size in pixels ``[B]``, which also scales the spatial positions. The
                first sample's size is used for all, or each sample's own with a ``video_mask``.
            ar: aspect ratio, height / width ``[B]``.
            fps: frames per second ``[B]``; 120 for images.
            drop_path: bool ``[2 * depth, B]``, see ``ConditionedModel``. Entry 2i skips a block's
                spatial branch, entry 2i + 1 its temporal and MLP branches.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        check_inputs(self.config, x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)

        # The timestep, the numbers of the sample and the text condition all tokens.
        t = self.t_embedder(self.timesteps(timestep, x_mask))  # [B, m, C]
        size, motion = self.embed_numbers(
            len(x), num_frames=num_frames, height=height, width=width, ar=ar, fps=fps
        )
        modulation = torch.cat([self.t_block(t + size), self.t_block_temp(t + motion)], dim=-1)
        conditioning = Conditioning(
            modulation.unflatten(-1, (9, -1)),  # [B, m, 9, C]
            self.conditioning_frames(x_mask),  # [B, T]
            self.embed_text(y, mask, drop_caption),
            temporal_rope=self.rope,
            at_once=ENTRIES,
        )

        # Embed the patches of the local spatial rows.
        trained_at = self.config.input_sq_size
        rows = self.shard(self.patch_grid(x, video_mask, height, width, trained_at=trained_at))
        x = self.x_embedder(self.patchify(x, rows))  # [R, L, C]
        x = x + self.pos_embed(rows, x.device).to(self.dtype)

        run_blocks = self.blocks_runner(block_cache)
        x, condition = run_blocks(x, rows, conditioning, drop_path)

        # As released, the size of the video reaches the final layer in conditioning frames only.
        t = torch.cat([t[:, :1], t[:, 1:] + size], dim=1)  # [B, m, C]
        x = self.final_layer(x, t, condition)  # [R, T, V * C_out]
        return self.unpatchify(x, condition.rows)  # [B, C_out, frames, height, width]

    def embed_numbers(self, samples: int, **numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Embeddings of height, width and aspect ratio, and of length and speed: ``[B, 1, C]``."""
        n = check_sample_numbers(numbers)
        pixels = torch.stack([n["height"], n["width"]], dim=1)  # [B, 2]
        size = [self.csize_embedder(pixels, samples), self.ar_embedder(n["ar"], samples)]
        length = self.fl_embedder(n["num_frames"], samples)
        motion = length + self.fps_embedder(n["fps"], samples)
        return torch.cat(size, dim=1)[:, None], motion[:, None]
