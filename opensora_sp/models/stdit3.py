"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2, and of 1.3, which attends within windows.

Reading order: what all STDiT models share (``conditioning.py``, ``base.py``), one block, the model, presets in
``registry.py``.

Tokens are rows (``rows.py``): a spatial block attends over the S patches of a frame, a temporal block over the T
frames of a patch (1.3: of a window of patches), and everything else acts on single tokens. The model says where tokens
enter (``shard``), change layout (``switch``) and leave (``gather``), and knows nothing of who holds which rows.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import ConditionedModel
from .conditioning import Condition, FinalLayer, ModulatedBlock, SharedConfig, Text
from .layers import (
    CaptionEmbedder,
    PatchEmbed3D,
    PositionEmbedding2D,
    RotaryEmbedding,
    RotaryEmbedding3D,
    SizeEmbedder,
    TimestepEmbedder,
)
from .token_layout import Rows

DEFAULT_FPS = 24.0


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(SharedConfig):
    """Constructor arguments; see ``SharedConfig`` for most of them.

    ``input_sq_size`` is the side of the square, in pixels, that the position embedding is scaled to.
    ``skip_y_embedder`` expects text already projected and packed. Open-Sora 1.3 has ``use_cond``, which embeds
    conditioning frames; windows of ``kernel_size`` (height, width, frames) patches for temporal attention, -1 for all;
    and with ``use_spatial_rope`` rotary positions also in a frame.
    """

    input_sq_size: int = 512
    model_max_length: int = 300
    qk_norm: bool = True
    skip_y_embedder: bool = False
    use_cond: bool = False
    kernel_size: tuple[int, int, int] | None = None
    use_spatial_rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("input_sq_size")
        if self.kernel_size is not None:
            object.__setattr__(self, "kernel_size", tuple(self.kernel_size))
            self._check_windows(self.kernel_size)
        elif self.use_spatial_rope:
            raise ValueError(
                "got use_spatial_rope without kernel_size; expected both or none; set kernel_size=(8, 8, -1)"
            )

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.kernel_size is None else self.kernel_size[:2]

    def _check_windows(self, kernel: tuple[int, int, int]) -> None:
        if (
            len(kernel) != 3
            or kernel[2] != -1
            or any(k != -1 and k < 1 for k in kernel)
            or self.full_attention
        ):
            raise ValueError(
                f"got kernel_size {kernel} and full_attention {self.full_attention}; expected (height, width, -1) in "
                "patches, windows through all frames, and no full attention; write for example (8, 8, -1)"
            )
        if self.hidden_size // self.num_heads % 6:
            raise ValueError(
                f"got hidden_size {self.hidden_size} and num_heads {self.num_heads} with kernel_size; expected heads "
                "whose width is a multiple of 6 (pairs of channels for frame, line and column); change one of the two"
            )


class STDiT3Block(ModulatedBlock):
    """Self-attention over a row, cross-attention to text, MLP; the first and last modulated by the timestep (adaLN)."""

    def __init__(
        self, config: STDiT3Config, rope: RotaryEmbedding | None = None, *, in_frame: bool = False
    ) -> None:
        super().__init__(config, qk_norm=config.qk_norm, rope=rope, in_frame=in_frame)

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
        rotary = RotaryEmbedding if config.kernel_size is None else RotaryEmbedding3D
        self.rope = rotary(width // config.num_heads)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        if config.use_cond:
            self.x_embedder_cond = PatchEmbed3D(config.patch_size, config.in_channels, width)
            self.x_embedder_cond_mask = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        in_frame = self.rope if config.use_spatial_rope else None
        self.spatial_blocks = nn.ModuleList(
            STDiT3Block(config, in_frame, in_frame=True) for _ in range(config.depth)
        )
        self.temporal_blocks = nn.ModuleList(
            STDiT3Block(config, rope=self.rope) for _ in range(config.depth)
        )
        self.final_layer = FinalLayer.of(config)
        starts_at_zero = [
            m for b in self.temporal_blocks for m in (b.attn.proj, b.cross_attn.proj, b.mlp.fc2)
        ]
        self._initialize(
            embedders=(self.t_embedder, self.fps_embedder, self.t_block, self.y_embedder),
            zero=[self.final_layer.linear, *starts_at_zero],  # so it starts as an image model
        )
        for embedder in self._embedders_of_conditions():  # and knows no conditioning frames
            nn.init.zeros_(embedder.proj.weight)
            nn.init.zeros_(embedder.proj.bias)  # type: ignore[arg-type]

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
    ) -> Tensor:
        """Predict the velocity (and, with ``pred_sigma``, a second set of channels) of noisy latents.

        Args:
            x: latents ``[B, C_in, frames, height, width]``; sizes that the patch does not divide are padded with
                zeros at the end.
            timestep: ``[B]``, 0 (data) to 1000 (noise).
            y: text features ``[B, 1, L, Cy]``, or what ``encode_text`` made of them; with ``skip_y_embedder`` projected
                and packed ``[1, N, C]``.
            mask: text tokens in use, ``[B, L]`` (tiled if it has fewer rows); with ``skip_y_embedder`` lengths ``[B]``.
                On the CPU, wherever x is, the host waits for no device; elsewhere lengths are read back.
            x_mask: bool ``[B, frames]``; False marks frames that are given: they see timestep 0.
            fps: frames per second ``[B]``, 24 where absent.
            height, width: pixels ``[B]``; set the scale of positions by the first sample's value, or with a
                ``video_mask`` by each sample's own; where absent that scale is 1 (a square of ``input_sq_size``).
            cond, cond_mask: conditioning frames (``use_cond``), latents shaped like x and which of their positions are
                given; embedded and added to x.
            mask_index: the frames that are given, of all samples alike; they attend to ``y_null`` instead of y. To be
                passed, maybe empty, with ``cond``.
            y_null: text features of these frames, shaped like y, or encoded; ``mask`` holds for both, where not.
            video_mask: bool ``[B, frames, height, width]``, for clips of different sizes in one batch: False outside of
                a clip. Each clip is treated as if it were alone, and the output outside is zero.
            drop_caption: bool ``[B]``; True takes the null caption instead of y, all its tokens. Best on the CPU, as
                ``mask``.
            drop_path: bool ``[2 * depth, B]`` in order of execution; True skips a block's modulated branches for that
                sample, and the kept ones are scaled by ``1 / (1 - rate)`` of that depth.

        Returns:
            ``[B, C_out, frames, height, width]`` in float32 (float64 when the model is float64).
        """
        self._check(x, timestep, y, mask, x_mask, drop_caption, drop_path, video_mask)
        self._check_conditions(x, y, cond, cond_mask, mask_index, y_null)
        grid = self._grid(x, video_mask, height, width, trained_at=self.config.input_sq_size)
        fps = timestep.new_full((1,), DEFAULT_FPS) if fps is None else fps
        t = self.t_embedder(self._times(timestep, x_mask))  # [B, m, C]
        t = t + self.fps_embedder(fps, len(x))[:, None]  # [B, m, C]
        modulation = self.t_block(t).unflatten(-1, (6, -1))  # [B, m, 6, C]
        text = self._text(y, mask, drop_caption)
        if mask_index:
            assert y_null is not None
            null = self._text(y_null, mask, None)
            text = Text(torch.cat([text.tokens, null.tokens]), [*text.lengths, *null.lengths])
        given = self._given_frames(x_mask)  # [B, T]

        def condition_of(rows: Rows, in_frame: bool) -> Condition:
            rope = None if in_frame and not self.config.use_spatial_rope else self.rope
            apart = sorted(set(mask_index or ()))
            return Condition.of(
                rows, modulation, given, text, apart=apart, rope=rope, in_frame=in_frame
            )

        rows = self.shard(grid)  # spatial rows
        tokens = self.x_embedder(self._patches(x, rows)) + self._embed_conditions(
            cond, cond_mask, rows
        )  # [R, S, C]
        x = tokens + self.pos_embed(rows, x.device).to(self.dtype)
        pairs = list(zip(self.spatial_blocks, self.temporal_blocks, strict=True))
        x, condition = self.run_pairs(
            pairs, x, condition_of, rows, drop_path
        )  # [R, T, C], temporal rows
        x = self.final_layer(x, t, condition)  # [R, T, V * C_out]
        return self._leave(x, condition.rows)  # [B, C_out, frames, height, width]

    def _embedders_of_conditions(self) -> list[PatchEmbed3D]:
        return [self.x_embedder_cond, self.x_embedder_cond_mask] if self.config.use_cond else []

    def _embed_conditions(
        self, cond: Tensor | None, cond_mask: Tensor | None, rows: Rows
    ) -> Tensor | float:
        """What conditioning frames add to the tokens, ``[R, S, C]`` or, without any, ``[C]`` zeros or nothing."""
        embedders = self._embedders_of_conditions()
        if (
            cond is None or cond_mask is None
        ):  # zeros that depend on all parameters, so that these get a gradient
            return sum(
                (0 * (p.proj.weight.flatten(1).sum(1) + p.proj.bias) for p in embedders), start=0.0
            )
        parts = zip(embedders, (cond, cond_mask), strict=True)
        return sum((embed(self._patches(z, rows)) for embed, z in parts), start=0.0)

    def _check_conditions(
        self,
        x: Tensor,
        y: Tensor | Text,
        cond: Tensor | None,
        cond_mask: Tensor | None,
        mask_index: Sequence[int] | None,
        y_null: Tensor | Text | None,
    ) -> None:
        config, given = (
            self.config,
            [cond is not None, cond_mask is not None, mask_index is not None],
        )
        if any(given) and not (all(given) and config.use_cond):
            raise ValueError(
                f"got cond, cond_mask, mask_index (passed: {given}) and use_cond {config.use_cond}; expected all, for "
                "a model with use_cond=True, or none; pass all three, or leave them out"
            )
        for name, tensor, like in (
            ("cond", cond, x),
            ("cond_mask", cond_mask, x),
            ("y_null", y_null, y),
        ):
            if (
                isinstance(tensor, Tensor)
                and isinstance(like, Tensor)
                and tensor.shape != like.shape
            ):
                raise ValueError(
                    f"got {name} of shape {tuple(tensor.shape)}; expected {list(like.shape)}; give it the batch's size"
                )
        frames = -(-x.shape[2] // config.patch_size[0])
        if mask_index and (
            y_null is None or config.skip_y_embedder or not set(mask_index) <= set(range(frames))
        ):
            raise ValueError(
                f"got mask_index {list(mask_index)}, y_null {'missing' if y_null is None else 'passed'} and "
                f"skip_y_embedder {config.skip_y_embedder}; expected frames of 0 to {frames - 1}, the text that they "
                "see as y_null, and text to be embedded; correct these"
            )
        if (
            mask_index
            and y_null is not None
            and not (isinstance(y, Tensor) and isinstance(y_null, Tensor))
        ):
            self._check_caption(
                len(x), y_null, None, None
            )  # encoded text has no shape to compare with

    def _embed_text(
        self, y: Tensor, mask: Tensor | None, drop: Tensor | None
    ) -> tuple[Tensor, list[int]]:
        if self.config.skip_y_embedder:
            assert mask is not None
            packed, lengths = y.flatten(0, 1), mask.tolist()
            if sum(lengths) != len(packed):
                raise ValueError(
                    f"got {len(packed)} packed text tokens and lengths {lengths}; expected lengths that sum to "
                    "as many; pack the tokens in use of every sample"
                )
            return packed.to(self.dtype), lengths
        return super()._embed_text(y, mask, drop)

    def _check_text(
        self, n: int, y: Tensor, mask: Tensor | None, drop_caption: Tensor | None
    ) -> None:
        if not self.config.skip_y_embedder:
            super()._check_text(n, y, mask, drop_caption)
        elif mask is None or drop_caption is not None:
            raise ValueError(
                "got no mask, or drop_caption, with skip_y_embedder; expected packed text with its lengths as mask; "
                "drop captions before packing"
            )
        elif y.ndim != 3 or y.shape[2] != self.config.hidden_size or tuple(mask.shape) != (n,):
            raise ValueError(
                f"got y of shape {tuple(y.shape)} and lengths of shape {tuple(mask.shape)} with skip_y_embedder; "
                f"expected [1, N, {self.config.hidden_size}] and [{n}]; project the text with y_embedder and pack it"
            )
