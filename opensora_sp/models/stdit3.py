"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2.

Reading order: what conditions a token, one block, the final layer, the model, presets in ``registry.py``.

Tokens are rows (``rows.py``): a spatial block attends over the S patches of a frame, a temporal block over the T
frames of a patch, and everything else acts on single tokens. The model says where tokens enter (``shard``), change
layout (``switch``) and leave (``gather``), and knows nothing of who holds which rows.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import (
    CaptionEmbedder,
    CrossAttention,
    Mlp,
    PatchEmbed3D,
    PositionEmbedding2D,
    RotaryEmbedding,
    SelfAttention,
    SizeEmbedder,
    TimestepEmbedder,
)
from .points import Gather, Rowwise, Segment, Shard, Switch
from .rows import PatchGrid, Rows

DEFAULT_FPS = 24.0
GATE = 2  # a branch has three entries in a modulation table: shift, scale, gate


@dataclass(frozen=True, kw_only=True)
class STDiT3Config:
    """Constructor arguments, named as in the public checkpoints' ``config.json``.

    ``class_dropout_prob`` and ``drop_path`` are rates for the training run, which draws what to drop and passes it to
    ``forward``; ``drop_path`` grows linearly over the depth, and kept branches are scaled by it.
    ``legacy_final_layer`` keeps the released models' final layer, which modulates conditioned frames twice.
    ``skip_y_embedder`` expects text already projected and packed.
    """

    in_channels: int = 4
    patch_size: tuple[int, int, int] = (1, 2, 2)
    input_sq_size: int = 512
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    caption_channels: int = 4096
    model_max_length: int = 300
    qk_norm: bool = True
    pred_sigma: bool = True
    class_dropout_prob: float = 0.1
    drop_path: float = 0.0
    skip_y_embedder: bool = False
    legacy_final_layer: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        counts = ("in_channels", "input_sq_size", "hidden_size", "depth", "num_heads", "caption_channels")
        for name in (*counts, "model_max_length", "mlp_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"got {name} {getattr(self, name)}; expected a positive number; change it")
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ValueError(f"got patch_size {self.patch_size}; expected (frames, height, width) >= 1; change it")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"got hidden_size {self.hidden_size} and num_heads {self.num_heads}; expected an even hidden_size / "
                "num_heads (rotary embedding turns pairs of channels); change one of the two"
            )
        for name in ("class_dropout_prob", "drop_path"):
            if not 0 <= (rate := getattr(self, name)) < 1:
                raise ValueError(f"got {name} {rate}; expected a rate in [0, 1); choose a smaller one")

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.pred_sigma else 1)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What the tokens of one layout's rows are conditioned on; computed once, shared by all blocks."""

    rows: Rows
    modulation: Tensor  # [B, m, 6, C]
    state: Tensor  # [R, 1 or L] int64: which entry of a table [B * m, ...] modulates these tokens
    masked: Tensor | None  # [R, 1 or L, 1] bool: True for tokens of frames that are given (timestep 0)
    text: Tensor  # [N, C], packed
    lengths: tuple[Sequence[int], Sequence[int]]  # tokens held and text tokens, per sample

    def per_token(self, table: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """Spread a table ``[B, m, k, C]`` over the tokens: k tensors ``[R, 1 or L, C]``, one at a time."""
        state = self.state if state is None else state
        entries = table.flatten(0, 1).unbind(1)  # k of [B * m, C]
        return tuple(entry.index_select(0, state.flatten()).unflatten(0, state.shape) for entry in entries)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class STDiT3Block(nn.Module):
    """Self-attention over a row, cross-attention to text, MLP; the first and last modulated by the timestep (adaLN)."""

    def __init__(self, config: STDiT3Config, rope: RotaryEmbedding | None = None) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = SelfAttention(width, heads, qk_norm=config.qk_norm, rope=rope)
        self.cross_attn = CrossAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.rowwise = Rowwise()

    def forward(self, x: Tensor, condition: Condition, keep: Tensor | None = None) -> Tensor:
        """Rows ``[R, L, C]`` -> ``[R, L, C]``; ``keep`` ``[B]`` scales each sample's branches (drop-path)."""
        table = self.scale_shift_table + condition.modulation  # [B, m, 6, C]
        if keep is not None:
            is_gate = torch.arange(6, device=x.device) % 3 == GATE
            table = table * torch.where(is_gate, keep[:, None], 1).to(table)[:, None, :, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = condition.per_token(table)  # [R, 1 or L, C] each
        x = x + gate1 * self.attn(modulate(self.norm1(x), shift1, scale1), condition.rows)
        x = x + self.cross_attn(x, condition.text, condition.lengths)
        return self.rowwise(self._feed_forward, condition.rows, x, shift2, scale2, gate2)

    def _feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.mlp(modulate(self.norm2(x), shift, scale))


class FinalLayer(nn.Module):
    """Norm, modulation and projection of a token to the channels of its patch."""

    def __init__(self, width: int, out_width: int, *, legacy: bool) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, out_width)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.legacy = legacy

    def forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Rows ``[R, L, C]`` and timestep embeddings ``[B, m, C]`` -> ``[R, L, V * C_out]``."""
        table = self.scale_shift_table + t[:, :, None]  # [B, m, 2, C]
        if condition.masked is None or not self.legacy:
            return self.linear(modulate(self.norm_final(x), *condition.per_token(table)))
        timed = condition.per_token(table, state=condition.state - condition.masked.squeeze(-1).long())
        timed_x = modulate(self.norm_final(x), *timed)  # what frames with the sample's timestep see
        twice = modulate(self.norm_final(timed_x), *condition.per_token(table))
        return self.linear(torch.where(condition.masked, twice, timed_x))


class STDiT3(nn.Module):
    """STDiT3 of Open-Sora 1.2: pairs of a spatial and a temporal block, text by cross-attention, adaLN-single.

    Raises:
        ValueError: from ``forward`` if shapes do not fit the configuration or each other.
    """

    Config = STDiT3Config
    sharding_points = dict(  # where sequence parallelism attaches itself
        shard="shard",
        switch="switch",
        segment="segment",
        gather="gather",
        spatial="spatial_blocks.*.attn",
        temporal="temporal_blocks.*.attn",
        rowwise="*_blocks.*.rowwise",
    )

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        patch_volume = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
        self.grad_checkpoint = False

        self.pos_embed = PositionEmbedding2D(width)
        self.rope = RotaryEmbedding(width // config.num_heads)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.fps_embedder = SizeEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config.caption_channels, width, config.model_max_length)
        self.spatial_blocks = nn.ModuleList(STDiT3Block(config) for _ in range(config.depth))
        self.temporal_blocks = nn.ModuleList(STDiT3Block(config, rope=self.rope) for _ in range(config.depth))
        self.final_layer = FinalLayer(width, patch_volume * config.out_channels, legacy=config.legacy_final_layer)
        self.shard, self.switch, self.segment, self.gather = Shard(), Switch(), Segment(), Gather()
        self._initialize()

    def set_grad_checkpoint(self, enabled: bool = True) -> None:
        """Keep only the input of each block in forward and recompute the block in backward."""
        self.grad_checkpoint = enabled

    @property
    def dtype(self) -> torch.dtype:
        return self.x_embedder.proj.weight.dtype

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
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
            y: text features ``[B, 1, L, Cy]``; with ``skip_y_embedder`` projected and packed ``[1, N, C]``.
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
        t = self._embed_time(timestep, fps, with_zero=x_mask is not None)  # [B, m, C]
        modulation = self.t_block(t).unflatten(-1, (6, -1))  # [B, m, 6, C]
        text, text_lengths = self._embed_text(y, mask, drop_caption)  # [N, C]
        given = None if x_mask is None else self._given_frames(x_mask)  # [B, T]
        keep = None if drop_path is None else self._branch_scales(drop_path)  # [2 * depth, B]

        def conditions(rows: Rows) -> Condition:
            return _condition(rows, modulation, given, text, text_lengths)

        rows = self.shard(grid)  # spatial rows
        patches = rows.slice(x).to(self.dtype)  # [R, S, V * C_in]
        positions = self._embed_positions(grid, height, width, x.device)  # [S, C]
        x = self.x_embedder(patches) + rows.patch_values(positions)  # [R, S, C]
        spatial, temporal = conditions(rows), None
        for i in range(self.config.depth):
            x = self._block(self.spatial_blocks[i], x, spatial, keep, 2 * i)  # [R, S, C]
            x, rows = self.switch(x, rows)  # [R, T, C], temporal rows
            temporal = temporal or conditions(rows)
            x = self._block(self.temporal_blocks[i], x, temporal, keep, 2 * i + 1)  # [R, T, C]
            if i + 1 < self.config.depth:
                x, rows = self.switch(x, rows)  # [R, S, C], spatial rows
        x = self.final_layer(x, t, temporal)  # [R, T, V * C_out]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.gather(x, rows)  # [B, C_out, frames, height, width]

    def _block(self, block: nn.Module, x: Tensor, condition: Condition, keep: Tensor | None, index: int) -> Tensor:
        return self.segment(
            block,
            condition.rows,
            x,
            condition,
            None if keep is None else keep[index],
            recompute=self.grad_checkpoint and torch.is_grad_enabled(),
            last=index == 2 * self.config.depth - 1,
        )

    def _embed_time(self, timestep: Tensor, fps: Tensor | None, *, with_zero: bool) -> Tensor:
        """Embeddings of each sample's timestep and, for given frames, of timestep 0: ``[B, m, C]``."""
        times = torch.stack([timestep, torch.zeros_like(timestep)], dim=1) if with_zero else timestep[:, None]
        fps = timestep.new_full((1,), DEFAULT_FPS) if fps is None else fps
        return self.t_embedder(times) + self.fps_embedder(fps, len(timestep))[:, None]

    def _embed_text(self, y: Tensor, mask: Tensor | None, drop: Tensor | None) -> tuple[Tensor, list[int]]:
        if self.config.skip_y_embedder:
            assert mask is not None
            return y.flatten(0, 1).to(self.dtype), mask.tolist()
        packed, lengths = self.y_embedder.pack(y, mask, drop)
        return self.y_embedder(packed.to(self.dtype)), lengths

    def _embed_positions(
        self, grid: PatchGrid, height: Tensor | None, width: Tensor | None, device: torch.device
    ) -> Tensor:
        """``[S, C]``, the same in every frame."""
        _, rows, columns = grid.shape
        scale = 1.0
        if height is not None and width is not None:
            scale = (float(height[0]) * float(width[0])) ** 0.5 / self.config.input_sq_size
        base_size = round((rows * columns) ** 0.5)
        return self.pos_embed(rows, columns, scale=scale, base_size=base_size, device=device).to(self.dtype)

    def _given_frames(self, x_mask: Tensor) -> Tensor:
        """``[B, frames]``, False for given frames -> ``[B, T]``, True for given frames of patches."""
        patch = self.config.patch_size[0]
        of_patch = [x_mask[:, i::patch] for i in range(patch)]
        for later in of_patch[1:]:
            if not torch.equal(of_patch[0][:, : later.shape[1]], later):
                raise ValueError(
                    f"got an x_mask that differs inside a patch of {patch} frames; expected the {patch} frames of a "
                    "patch to agree; round the mask to whole patches"
                )
        return ~of_patch[0].bool()

    def _branch_scales(self, drop_path: Tensor) -> Tensor:
        """What each block's branches of each sample are multiplied by, ``[2 * depth, B]``."""
        rates = torch.linspace(0, self.config.drop_path, self.config.depth, dtype=torch.float64)
        scales = (1 / (1 - rates)).repeat_interleave(2)[:, None].to(drop_path.device)
        return torch.where(drop_path, torch.zeros_like(scales), scales)

    def _check(self, x: Tensor, timestep: Tensor, y: Tensor, mask, x_mask, drop_caption, drop_path) -> None:  # noqa: ANN001
        config, n = self.config, x.shape[0]
        if x.ndim != 5 or x.shape[1] != config.in_channels:
            raise ValueError(
                f"got x of shape {tuple(x.shape)}; expected [B, {config.in_channels}, frames, height, width]; "
                "pass latents of the VAE that the model was configured for (in_channels)"
            )
        if not config.skip_y_embedder and (
            y.ndim != 4 or y.shape[0] != n or y.shape[1] != 1 or y.shape[3] != config.caption_channels
        ):
            raise ValueError(
                f"got y of shape {tuple(y.shape)}; expected [{n}, 1, L, {config.caption_channels}]; "
                "check the text encoder and caption_channels"
            )
        if not config.skip_y_embedder and y.shape[2] > config.model_max_length:
            raise ValueError(
                f"got {y.shape[2]} text tokens; expected at most model_max_length = {config.model_max_length}; "
                "truncate the text or raise model_max_length"
            )
        if config.skip_y_embedder and (mask is None or drop_caption is not None):
            raise ValueError(
                "got no mask, or drop_caption, with skip_y_embedder; expected packed text with its lengths as mask; "
                "drop captions before packing"
            )
        if mask is not None and not config.skip_y_embedder and (n % mask.shape[0] or mask.shape[-1] != y.shape[2]):
            raise ValueError(
                f"got a text mask of shape {tuple(mask.shape)}; expected [{n}, {y.shape[2]}]; pass one row per sample"
            )
        expected = {
            "timestep": (timestep, (n,)),
            "x_mask": (x_mask, (n, x.shape[2])),
            "drop_caption": (drop_caption, (n,)),
            "drop_path": (drop_path, (2 * config.depth, n)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"got {name} of shape {tuple(tensor.shape)}; expected {list(shape)}; pass one entry per sample"
                )

    def _initialize(self) -> None:
        """As the released models began: temporal branches and the output are zero, so it starts as an image model."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        for embedder in (self.t_embedder, self.fps_embedder, self.t_block, self.y_embedder):
            for linear in embedder.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=0.02)
        zero = [self.final_layer.linear]
        zero += [linear for b in self.temporal_blocks for linear in (b.attn.proj, b.cross_attn.proj, b.mlp.fc2)]
        for linear in zero:
            nn.init.zeros_(linear.weight)


def _condition(
    rows: Rows, modulation: Tensor, given: Tensor | None, text: Tensor, text_lengths: list[int]
) -> Condition:
    """Lay the conditions of a batch out over the rows held here."""
    state = rows.samples(modulation.device)[:, None] * modulation.shape[1]  # [R, 1]
    masked = None
    if given is not None:
        masked = rows.frame_values(given)  # [R, 1 or T]
        state = state + masked
        masked = masked[..., None]
    return Condition(
        rows=rows,
        modulation=modulation,
        state=state,
        masked=masked,
        text=text,
        lengths=(rows.tokens_per_sample(), text_lengths),
    )
