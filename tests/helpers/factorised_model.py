"""A factorised video transformer as of another project: one file, outside of the package.

As in Latte (Ma et al., 2024), blocks over the patches of a frame and over the frames of a patch
follow each other. Positions of patches and of frames are added to the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opensora_sp.models.base import MODEL_POINTS, ConditionedModel
from opensora_sp.models.blocks import FinalLayer, ModulatedBlock
from opensora_sp.models.conditions import Conditioning, Text
from opensora_sp.models.input_checks import check_inputs
from opensora_sp.models.layers import CaptionEmbedder, PatchEmbed3D, TimestepEmbedder
from opensora_sp.models.positions import PositionEmbedding2D, position_embedding
from opensora_sp.models.stdit_config import SharedConfig
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL


@dataclass(frozen=True, kw_only=True)
class FactorisedConfig(SharedConfig):
    rotary = False

    @property
    def num_blocks(self) -> int:
        return 2 * self.depth


class FactorisedBlock(ModulatedBlock):
    """Self-attention over a row, cross-attention to text, MLP."""

    def forward(self, x: Tensor, condition: Any, branch_scale: Tensor | None) -> Tensor:
        entries = condition.entries(self.scale_shift_table, 0, branch_scale)
        shift, scale, gate, *mlp = entries
        x, branch = self.attend_row(self.attn, x, shift, scale, condition)
        x, branch = self.add_and_attend_text(x, gate, branch, self.attn, condition)
        return self.feed_forward(x, branch, mlp, condition)


class FactorisedModel(ConditionedModel):
    Config = FactorisedConfig
    sharding_points = MODEL_POINTS | dict(
        spatial="blocks.*.spatial.attn",
        temporal="blocks.*.temporal.attn",
        tokenwise="blocks.*.*.tokenwise",
    )

    def __init__(self, config: FactorisedConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.pos_embed = PositionEmbedding2D(width)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.blocks = nn.ModuleList(self._pair(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.initialize(
            embedders=(self.t_embedder, self.t_block, self.y_embedder),
            zero=("final_layer.linear",),
        )

    @staticmethod
    def _pair(config: FactorisedConfig) -> nn.ModuleDict:
        spatial = FactorisedBlock(config, in_frame=True)
        return nn.ModuleDict({"spatial": spatial, "temporal": FactorisedBlock(config)})

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
        """Arguments and result: see ``ConditionedModel``."""
        check_inputs(self.config, x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)
        t = self.t_embedder(self.timesteps(timestep, x_mask))  # [B, m, C]
        conditioning = Conditioning(
            self.t_block(t).unflatten(-1, (6, -1)),  # [B, m, 6, C]
            self.conditioning_frames(x_mask),
            self.embed_text(y, mask, drop_caption),
        )

        rows = self.shard(self.patch_grid(x, video_mask))
        x = self.x_embedder(self.patchify(x, rows))  # [R, S, C]
        frames = position_embedding(rows.frames(x.device).float(), self.config.hidden_size)
        x = x + self.pos_embed(rows, x.device).to(self.dtype) + frames.to(self.dtype)

        scales = self.branch_scales(drop_path)
        pairs: list[Any] = list(self.blocks)
        for i, pair in enumerate(pairs):
            x = self.run_part(pair.spatial, x, conditioning.of(SPATIAL, rows), scales[2 * i])
            x, rows = self.switch(x, rows)  # [R, T, C]

            last, condition = i + 1 == len(pairs), conditioning.of(TEMPORAL, rows)
            x = self.run_part(pair.temporal, x, condition, scales[2 * i + 1], last=last)
            if not last:
                x, rows = self.switch(x, rows)  # [R, S, C]
        return self.unpatchify(self.final_layer(x, t, condition), rows)
