"""STDiT, the spatial-temporal diffusion transformer of Open-Sora 1.0.

With frame masks it is also the STDiT of Open-Sora's 1.2 code.

Reading order: this file, ``blocks.py``, ``layers.py``, ``conditioning.py``. A block attends over
the S patches of a frame, then over the T frames of a patch, then to the text. So it has two parts,
one in spatial and one in temporal rows (``token_layout.py``). Positions are tables for one latent
size.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R local
rows, V patch volume, m modulation states of a sample (1, or 2 with conditioning frames).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import MODEL_POINTS, ConditionedModel
from .blocks import FinalLayer, STDiTBlock
from .conditioning import ENTRIES, Conditioning, Text
from .config import STDiTConfig
from .embedders import CaptionEmbedder, PatchEmbed3D, TimestepEmbedder
from .input_checks import check_input_size, check_inputs
from .positions import frame_position_embedding, position_embedding


class STDiT(ConditionedModel):
    """STDiT of Open-Sora 1.0: blocks of spatial and temporal attention, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiTConfig
    config: STDiTConfig
    sharding_points = MODEL_POINTS | dict(
        spatial="blocks.*.attn", temporal="blocks.*.attn_temp", tokenwise="blocks.*.tokenwise"
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
        self.final_layer = FinalLayer(config)

        # Without its temporal and text branches, the model begins as an image model.
        self.initialize(
            embedders=(self.t_embedder, self.t_block, self.y_embedder),
            zero=("final_layer.linear", "blocks.*.attn_temp.proj", "blocks.*.cross_attn.proj"),
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
            timestep, y, mask, x_mask, video_mask, drop_caption: see ``ConditionedModel``.
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
        x = self.x_embedder(self.patchify(x, rows))  # [R, S, C]
        x = x + self.pos_embed[0, rows.patches(x.device)]

        scales = self.branch_scales(drop_path)
        blocks: list[Any] = list(self.blocks)
        for i, block in enumerate(blocks):
            x = self.run_part(block.spatial, x, conditioning.spatial(rows), scales[2 * i])
            x, rows = self.switch(x, rows)  # [R, T, C], temporal rows

            last = i + 1 == self.config.depth
            positions = None if i else self.pos_embed_temporal
            condition = conditioning.temporal(rows)
            x = self.run_part(block.temporal, x, condition, scales[2 * i + 1], positions, last=last)
            if not last:
                x, rows = self.switch(x, rows)  # [R, S, C], spatial rows

        x = self.final_layer(x, t, conditioning.temporal(rows))  # [R, T, V * C_out]
        return self.unpatchify(x, rows)  # [B, C_out, frames, height, width]

    def position_tables(self) -> dict[str, Tensor]:
        """Tables of a frame's patches ``[1, S, C]`` and of the frames ``[1, T, C]``, by name."""
        config, width = self.config, self.config.hidden_size
        sizes = zip(config.input_size, config.patch_size, strict=True)
        frames, lines, columns = (torch.arange(size // patch) for size, patch in sizes)

        lines, columns = lines / config.space_scale, columns / config.space_scale
        space = frame_position_embedding(lines.double(), columns.double(), width)
        time = position_embedding(frames.double() / config.time_scale, width)
        return {"pos_embed": space.float()[None], "pos_embed_temporal": time.float()[None]}
