"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2 and 1.3.

Reading order: this file, ``base.py``, ``blocks.py``, ``layers.py``, ``conditions.py``. Pairs of
blocks follow each other: a spatial block attends over the S patches of a frame, a temporal block
over the T frames of a patch. Tokens lie in rows that one attention takes whole
(``token_layout.py``), so they switch between spatial and temporal rows from block to block.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R local
rows, L tokens of a row (S or T), V patch volume, m modulation states of a sample (1, or 2 with
conditioning frames).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import MODEL_POINTS, ConditionedModel
from .block_cache import BlockCache
from .blocks import FinalLayer, STDiT3Block
from .conditions import Condition, Conditioning, Text
from .functions import with_zero_gradients
from .input_checks import check_conditioning_frames, check_extra_inputs, check_inputs
from .layers import CaptionEmbedder, PatchEmbed3D, SizeEmbedder, TimestepEmbedder
from .positions import PositionEmbedding2D, RotaryEmbedding, RotaryEmbedding3D
from .stdit_config import STDiT3Config
from .token_layout import Rows

DEFAULT_FPS = 24.0


class STDiT3(ConditionedModel):
    """STDiT3 of Open-Sora 1.2: pairs of a spatial and a temporal block, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiT3Config
    config: STDiT3Config
    Block: ClassVar[type[STDiT3Block]] = STDiT3Block
    sample_inputs = ("fps", "height", "width")
    token_parts = ("x_embedder", "spatial_blocks", "temporal_blocks", "final_layer")
    sharding_points: Mapping[str, str | None] = MODEL_POINTS | dict(
        spatial="spatial_blocks.*.attn",
        temporal="temporal_blocks.*.attn",
        tokenwise="*_blocks.*.tokenwise",
    )
    # Layers that begin with zeros. No temporal branch contributes at initialization, so the model
    # starts as an image model. The embedders of conditioning frames are zero too, so these frames
    # are ignored at first.
    zero_initialized: ClassVar[tuple[str, ...]] = (
        "final_layer.linear",
        "x_embedder_cond*.proj",
        "temporal_blocks.*attn.proj",
        "temporal_blocks.*.mlp.fc2",
    )

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__(config)
        # Blocks begin with a modulation, so switches need not copy.
        self.switch.before_modulation = True
        width, depth = config.hidden_size, config.depth
        self.pos_embed = PositionEmbedding2D(width)
        rotary = RotaryEmbedding if config.kernel_size is None else RotaryEmbedding3D
        self.rope = rotary(width // config.num_heads)
        spatial_rope = self.rope if config.use_spatial_rope else None

        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        if config.use_cond:
            self.x_embedder_cond = PatchEmbed3D(config.patch_size, config.in_channels, width)
            self.x_embedder_cond_mask = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)

        self.spatial_blocks = nn.ModuleList(
            self.Block(config, spatial_rope, in_frame=True) for _ in range(depth)
        )
        if config.skip_temporal:
            self.sharding_points = {**self.sharding_points, "temporal": None}
        else:
            self.temporal_blocks = nn.ModuleList(
                self.Block(config, self.rope) for _ in range(depth)
            )
        self.final_layer = FinalLayer(config)

        self.initialize(
            embedders=(self.t_embedder, self.fps_embedder, self.t_block, self.y_embedder),
            zero=self.zero_initialized,
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
        cond: Tensor | None = None,
        cond_mask: Tensor | None = None,
        mask_index: Sequence[int] | None = None,
        y_null: Tensor | Text | None = None,
        *,
        video_mask: Tensor | None = None,
        drop_caption: Tensor | None = None,
        drop_path: Tensor | None = None,
        block_cache: BlockCache | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """Predict the velocity (and, with ``pred_sigma``, more channels) of noisy latents.

        Args:
            x, timestep, y, mask, x_mask, video_mask, drop_caption, block_cache: see
                ``ConditionedModel``.
            fps: frames per second ``[B]``, 24 where absent.
            height, width: size in pixels ``[B]``, which scales the spatial positions. The first
                sample's size is used for all, or each sample's own with a ``video_mask``. Without
                them the scale is 1 (a square of ``input_sq_size``).
            cond, cond_mask, mask_index, y_null: conditioning frames, see ``embed_patches``
                and ``embed_texts``.
            drop_path: bool ``[2 * depth, B]``, see ``ConditionedModel``. Each entry skips a block's
                modulated branches; with ``skip_temporal`` every second one has no block.
            extra: the ``extra_inputs`` of a derived model, ``[B, ...]`` each.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        config = self.config
        check_inputs(config, x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)
        check_conditioning_frames(config, x, y, cond, cond_mask, mask_index, y_null)
        check_extra_inputs(self.extra_inputs, x, extra)

        # The timestep, the frame rate and the text condition all tokens.
        grid = self.patch_grid(x, video_mask, height, width, trained_at=config.input_sq_size)
        frame_embedding = self.embed_frames(extra, grid.frames)  # [B, T, C]
        t = self.embed_timestep(timestep, x_mask, fps, frame_embedding)  # [B, m or m * T, C]
        text = self.embed_texts(y, mask, drop_caption, mask_index, y_null)
        conditioning = self.condition_on(t, text, x_mask, mask_index, frame_embedding, extra)

        # Embed the patches of the local rows. Unnamed, the blocks free their input early.
        rows, run_blocks = self.shard(grid), self.blocks_runner(block_cache)
        x, condition = run_blocks(
            self.embed_patches(x, rows, cond, cond_mask),  # [R, L, C]
            rows,
            conditioning,
            drop_path,
        )
        x = self.final_layer(x, t, condition)  # [R, L, V * C_out]
        return self.unpatchify(x, condition.rows)  # [B, C_out, frames, height, width]

    def run_blocks(
        self, x: Tensor, rows: Rows, conditioning: Conditioning, drop_path: Tensor | None
    ) -> tuple[Tensor, Condition]:
        # Spatial and temporal blocks in turn; the rows of a block are attention sequences.
        # The tables of all blocks are added to the modulation at once.
        blocks, scales = self.blocks, self.branch_scales(drop_path)
        tables = conditioning.tables([block.scale_shift_table for block in blocks])
        for i, block in enumerate(blocks):
            last = not self.config.alternates or i + 1 == len(blocks)
            condition = conditioning.of(block.layout, rows)
            # With overlap, an ``InFlightSwitch`` until the switch.
            x = self.run_part(block, x, condition, tables[i], scales[i], last=last)
            if not last:
                x, rows = self.switch(x, rows)  # [R, S, C] -> [R, T, C], or back
        return x, condition

    @property
    def blocks(self) -> list[Any]:
        """The blocks in the order in which they run."""
        if self.config.skip_temporal:
            return list(self.spatial_blocks)
        pairs = zip(self.spatial_blocks, self.temporal_blocks, strict=True)
        return list(chain.from_iterable(pairs))

    def embed_timestep(
        self,
        timestep: Tensor,
        x_mask: Tensor | None,
        fps: Tensor | None,
        frame_embedding: Tensor | None,
    ) -> Tensor:
        """Embedding of timestep and frame rate, ``[B, m, C]``; by frames ``[B, m * T, C]``.

        Args:
            frame_embedding: ``[B, T, C]``, the result of ``embed_frames``.
        """
        fps = timestep.new_full((1,), DEFAULT_FPS) if fps is None else fps
        t = self.t_embedder(self.timesteps(timestep, x_mask))  # [B, m, C]
        t = t + self.fps_embedder(fps, len(timestep))[:, None]  # [B, m, C]
        if frame_embedding is None:
            return t
        return (t[:, :, None] + frame_embedding[:, None]).flatten(1, 2)

    def condition_on(
        self,
        t: Tensor,
        text: Text,
        x_mask: Tensor | None,
        mask_index: Sequence[int] | None,
        frame_embedding: Tensor | None,
        extra: Mapping[str, Tensor],
    ) -> Conditioning:
        """What the blocks are conditioned on; arguments as in ``forward``.

        Args:
            t: the result of ``embed_timestep``.
            text: the result of ``embed_texts``.
            frame_embedding: the result of ``embed_frames``.
        """
        return Conditioning(
            self.t_block(t).unflatten(-1, (6, -1)),  # [B, m, 6, C]
            self.conditioning_frames(x_mask),  # [B, T]
            text,
            null_frames=sorted(set(mask_index or ())),
            spatial_rope=self.rope if self.config.use_spatial_rope else None,
            temporal_rope=self.rope,
            per_frame=frame_embedding is not None,
            lay_out=partial(self.lay_out, extra),
        )

    def embed_frames(self, extra: Mapping[str, Tensor], num_frames: int) -> Tensor | None:
        """Further embedding of each frame, ``[B, T, C]``, added to the timestep's; None for none.

        For derived models, which make it of their ``extra_inputs``. Every rank computes it for all
        frames, and blocks read the frames of the local rows.

        Args:
            num_frames: T, frames of patches.
        """
        return None

    def lay_out(self, extra: Mapping[str, Tensor], rows: Rows) -> Mapping[str, Any]:
        """Lay out ``extra_inputs`` for the local rows; blocks read them as ``condition.extra``.

        For derived models. It is called once for the rows of spatial and once for the rows of
        temporal blocks. ``self.patchify(z, rows)`` has the local patches of a tensor like x, and
        ``Text(tokens, lengths).of_rows(rows)`` the sequences that local tokens may attend to.
        """
        return {}

    def embed_patches(
        self, x: Tensor, rows: Rows, cond: Tensor | None, cond_mask: Tensor | None
    ) -> Tensor:
        """The local patches with their positions, and conditioning frames: tokens ``[R, L, C]``.

        Args:
            cond, cond_mask: conditioning frames of a model with ``use_cond``, latents shaped like
                x, and which of their positions are given; None without conditioning frames.
        """
        tokens = self.x_embedder(self.patchify(x, rows))
        if self.config.use_cond:
            embed, embed_mask = self.x_embedder_cond, self.x_embedder_cond_mask
            if cond is None or cond_mask is None:
                # Gradients in the order of batches that have conditioning frames.
                unused = *embed.parameters(), *embed_mask.parameters()
                tokens = with_zero_gradients(tokens, *unused)
            else:
                frames = embed(self.patchify(cond, rows))
                tokens = tokens + (frames + embed_mask(self.patchify(cond_mask, rows)))
        return tokens + self.pos_embed(rows, x.device).to(self.dtype)

    def embed_texts(
        self,
        y: Tensor | Text,
        mask: Tensor | None,
        drop: Tensor | None,
        mask_index: Sequence[int] | None,
        y_null: Tensor | Text | None,
    ) -> Text:
        """The captions, and after them a second one of each sample for its conditioning frames.

        Args:
            mask_index: indices of the conditioning frames, the same in all samples. These frames
                attend to ``y_null`` instead of y. Required with ``cond``; may be empty.
            y_null: text features for these frames, shaped like y, or the result of
                ``encode_text``. Unless they are encoded, ``mask`` applies to both y and y_null. By
                default the null caption, unless y is encoded.
        """
        text = self.embed_text(y, mask, drop)
        if not mask_index:
            return text
        if y_null is not None:
            return text.followed_by(self.embed_text(y_null, mask, None))
        everything = torch.ones(len(text.lengths), dtype=torch.bool)
        return text.followed_by(self.embed_text(y, mask, everything))
