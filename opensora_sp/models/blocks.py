"""The transformer blocks of the STDiT models, and their final layer.

A block runs self-attention over the tokens of a row, cross-attention to the text, and an MLP. The
timestep modulates the first and the last (adaLN-single of PixArt-alpha, Chen et al., 2023)::

    x = x + gate * self_attention(norm(x) * (1 + scale) + shift)
    x = x + cross_attention(x, text)
    x = x + gate * mlp(norm(x) * (1 + scale) + shift)

A block of STDiT3 is either spatial or temporal. A block of STDiT or STDiT2 has two parts:
``spatial`` is the self-attention over a frame, ``temporal`` the one over frames and all the rest.

Legend: B samples, R local rows here, L tokens of a row (S patches or T frames), C hidden width,
V patch volume, m modulation states of a sample, b samples of n rows (``Rows.expand_to_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .conditions import Condition
from .hook_points import Tokenwise
from .kernels import fused
from .layers import CrossAttention, Mlp, SelfAttention, deferred_bias
from .positions import RotaryEmbedding
from .recompute import EVERYTHING
from .stdit_config import SharedConfig, STDiT2Config, STDiT3Config, STDiTConfig
from .token_layout import SPATIAL, TEMPORAL

# Where in a modulation the entries (shift, scale, gate) of a branch begin.
ATTENTION, MLP, TEMPORAL_ATTENTION = 0, 3, 6
GATE = 2  # of the attention


class ModulatedBlock(nn.Module):
    """The layers that all blocks have, and the branches that end them.

    ``scale_shift_table`` is added to the modulation. Blocks take tokens ``[R, L, C]`` and return as
    many. ``branch_scale`` ``[B]`` multiplies the modulated branches of each sample (drop-path).
    ``checkpoint_level`` is what forward keeps for backward (``recompute.py``).
    """

    checkpoint_level: int = EVERYTHING

    def __init__(
        self,
        config: SharedConfig,
        *,
        qk_norm: bool = False,
        rope: RotaryEmbedding | None = None,
        in_frame: bool = False,
    ) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.attn = SelfAttention(
            width, heads, qk_norm=qk_norm, rope=rope, in_frame=in_frame, defers_bias=True
        )
        self.cross_attn = CrossAttention(width, heads, defers_bias=True)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), width, defers_bias=True)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.tokenwise = Tokenwise()

    def attend_row(
        self,
        attention: SelfAttention,
        x: Tensor,
        shift: Tensor,
        scale: Tensor,
        condition: Condition,
    ) -> tuple[Tensor, Tensor]:
        """``x``, and ``attention(norm(x) * (1 + scale) + shift)`` within each row."""
        x, modulated = fused.norm_modulate(x, shift, scale, condition.part)
        return x, attention(modulated, condition.rows, condition.row_tables)

    def attend_text(self, x: Tensor, condition: Condition) -> Tensor:
        """Cross-attention of tokens ``[R, L, C]`` to the text of their own sample."""
        return self.cross_attn(
            x,
            condition.text.tokens,
            condition.text.packing,
            order=condition.order,
            keys_values=condition.block_keys_values,
            backend=condition.rows.grid.attention.get("cross", "auto"),
        )

    def add_and_attend_text(
        self,
        x: Tensor,
        gate: Tensor,
        branch: Tensor,
        attention: SelfAttention,
        condition: Condition,
    ) -> tuple[Tensor, Tensor]:
        """``x + gate * branch`` of a self-attention, and its cross-attention to the text."""
        # The residual connection and the cross-attention take the same tokens. They are returned
        # twice, so that the kernel's backward adds the two gradients.
        bias = deferred_bias(attention.proj)
        x, query = fused.add_gated_twice(x, gate, branch, condition.part, bias)
        return x, self.attend_text(query, condition)

    def feed_forward(
        self, x: Tensor, branch: Tensor, mlp: Sequence[Tensor], condition: Condition
    ) -> Tensor:
        """Add the branch of the text, then the MLP, ``mlp`` being its shift, scale and gate."""
        # The last work on single tokens: a strategy may finish chunks of rows, and send each.
        return self.tokenwise(self.add_mlp, condition.rows, (x, branch), mlp, condition.part)

    def add_mlp(
        self,
        x: Tensor,
        branch: Tensor,
        shift: Tensor,
        scale: Tensor,
        gate: Tensor,
        part: fused.Part | None = None,
    ) -> Tensor:
        """``x + branch``, then ``x + gate * mlp(norm(x) * (1 + scale) + shift)``."""
        biases = deferred_bias(self.cross_attn.proj), deferred_bias(self.mlp.fc2)
        x, modulated = fused.add_norm_modulate(x, branch, shift, scale, part, biases[0])
        return fused.add_gated(x, gate, self.mlp(modulated), part, biases[1])


class STDiT3Block(ModulatedBlock):
    """Self-attention over a row, cross-attention to text, MLP."""

    def __init__(
        self, config: STDiT3Config, rope: RotaryEmbedding | None = None, *, in_frame: bool = False
    ) -> None:
        super().__init__(config, qk_norm=config.qk_norm, rope=rope, in_frame=in_frame)
        # Of the rows in which tokens attend.
        self.layout = SPATIAL if in_frame else TEMPORAL

    def forward(
        self, x: Tensor, condition: Condition, table: Tensor | None, branch_scale: Tensor | None
    ) -> Tensor:
        """Rows ``[R, L, C]`` -> ``[R, L, C]``, modulated by a ``table`` ``[B, m, 6, C]``.

        The table is ``scale_shift_table`` and the timestep's (``Conditioning.tables``); without one
        they are added here.
        """
        table = self.scale_shift_table if table is None else table
        shift, scale, gate, *mlp = condition.entries(table, ATTENTION, branch_scale)

        x, branch = self.attend_row(self.attn, x, shift, scale, condition)
        x, branch = self.add_and_attend_text(x, gate, branch, self.attn, condition)
        return self.feed_forward(x, branch, mlp, condition)


class TwoPartBlock(ModulatedBlock):
    """A block of a spatial and a temporal part, between which tokens change their layout."""

    attn_temp: SelfAttention

    def spatial(self, x: Tensor, condition: Condition, branch_scale: Tensor | None) -> Tensor:
        """Spatial rows ``[R, S, C]`` -> ``[R, S, C]``."""
        table = self.scale_shift_table[:MLP]
        shift, scale, gate = condition.entries(table, ATTENTION, branch_scale)
        x, branch = self.attend_row(self.attn, x, shift, scale, condition)
        return fused.add_gated(x, gate, branch, condition.part, deferred_bias(self.attn.proj))

    def finish(
        self, x: Tensor, gate: Tensor, branch: Tensor, condition: Condition, scale: Tensor | None
    ) -> Tensor:
        """Add the temporal attention, attend to the text, and run the MLP."""
        x, branch = self.add_and_attend_text(x, gate, branch, self.attn_temp, condition)
        mlp = condition.entries(self.scale_shift_table[MLP:], MLP, scale)
        return self.feed_forward(x, branch, mlp, condition)


class STDiTBlock(TwoPartBlock):
    """Spatial and temporal self-attention, cross-attention to text, MLP.

    The temporal attention has no norm. Its gate is the gate of the spatial one, on all frames as
    the timestep of the sample sets it.
    """

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__(config, in_frame=True)
        width, heads = config.hidden_size, config.num_heads
        self.attn_temp = SelfAttention(width, heads, qk_norm=False, defers_bias=True)

    def temporal(
        self,
        x: Tensor,
        condition: Condition,
        branch_scale: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Temporal rows ``[R, T, C]`` -> ``[R, T, C]``.

        ``positions`` ``[1, T, C]`` of the frames are added to what the attention sees.
        """
        table = self.scale_shift_table[GATE:MLP]
        (gate,) = condition.entries(table, GATE, branch_scale, ignore_frames=True)
        with_positions = x if positions is None else x + positions
        branch = self.attn_temp(with_positions, condition.rows, condition.row_tables)
        return self.finish(x, gate, branch, condition, branch_scale)


class STDiT2Block(TwoPartBlock):
    """Spatial and temporal self-attention, cross-attention to text, MLP.

    The temporal attention has a norm and further entries.
    """

    def __init__(self, config: STDiT2Config, rope: RotaryEmbedding) -> None:
        super().__init__(config, qk_norm=config.qk_norm, in_frame=True)
        width, heads = config.hidden_size, config.num_heads
        self.attn_temp = SelfAttention(
            width,
            heads,
            qk_norm=config.qk_norm,
            rope=rope,
            norm_last=config.qk_norm_legacy,
            defers_bias=True,
        )
        self.scale_shift_table_temporal = nn.Parameter(torch.randn(3, width) / width**0.5)

    def temporal(self, x: Tensor, condition: Condition, branch_scale: Tensor | None) -> Tensor:
        """Temporal rows ``[R, T, C]`` -> ``[R, T, C]``."""
        table = self.scale_shift_table_temporal
        shift, scale, gate = condition.entries(table, TEMPORAL_ATTENTION, branch_scale)
        x, branch = self.attend_row(self.attn_temp, x, shift, scale, condition)
        return self.finish(x, gate, branch, condition, branch_scale)


class FinalLayer(nn.Module):
    """Norm, modulation and projection of a token to the channels of its patch."""

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.linear = nn.Linear(width, math.prod(config.patch_size) * config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.legacy = config.legacy_final_layer

    def forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Rows ``[R, L, C]`` and timestep embeddings ``[B, m, C]`` -> ``[R, L, V * C_out]``."""
        table = self.scale_shift_table + t[:, :, None]  # [B, m, 2, C]
        if condition.frames is None or not self.legacy:
            return self.linear(self.modulate(x, table, condition))

        # As released: all frames are modulated by the timestep of their sample, and conditioning
        # frames after that once more, by timestep 0.
        once = self.modulate(x, table, condition, ignore_frames=True)
        twice = self.modulate(once, table, condition)
        frames = condition.rows.expand_to_rows(condition.frames)  # [b, 1 or n, 1 or L, 1]
        by_sample = len(frames), len(x) // len(frames)
        chosen = torch.where(frames, twice.unflatten(0, by_sample), once.unflatten(0, by_sample))
        return self.linear(chosen.flatten(0, 1))

    def modulate(
        self, x: Tensor, table: Tensor, condition: Condition, *, ignore_frames: bool = False
    ) -> Tensor:
        """The norm, and shift and scale of a table ``[B, m, 2, C]``."""
        shift, scale = condition.per_token(table, ignore_frames=ignore_frames)
        _, modulated = fused.norm_modulate(x, shift, scale, condition.part)
        return modulated
