"""What the STDiT models share: configuration, what a token is conditioned on, a block's branches, the final layer.

Whatever depends on the rows held is laid out over them once per layout (``Condition``) and shared by all blocks.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask), k
entries of a modulation (shift, scale and gate of each branch), b samples of n rows (``Rows.spread``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensora_sp.transfer import to_device

from .attention import check_backend
from .hook_points import Rowwise
from .layers import CrossAttention, Mlp, RotaryEmbedding, SelfAttention
from .packing import Packing
from .token_layout import SPATIAL, PatchGrid, Rows

IMAGE_FPS = 120.0
GATE = 2  # a branch has three entries in a modulation: shift, scale, gate


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """Constructor arguments of all STDiT models, named as in the public checkpoints' ``config.json``.

    ``class_dropout_prob`` and ``drop_path`` are rates for the training run, which draws what to drop and passes it to
    ``forward``; ``drop_path`` grows linearly over the depth, and kept branches are scaled by it.
    ``legacy_final_layer`` keeps the released models' final layer, which modulates conditioned frames twice. With
    ``full_attention`` all tokens of a clip attend to each other in every self-attention, as in Open-Sora-Plan 1.2.
    ``attention`` is the backend, one of ``attention.BACKENDS``; no property of the weights.
    """

    rotary: ClassVar[bool] = True

    in_channels: int = 4
    patch_size: tuple[int, int, int] = (1, 2, 2)
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    caption_channels: int = 4096
    model_max_length: int = 120
    pred_sigma: bool = True
    class_dropout_prob: float = 0.1
    drop_path: float = 0.0
    legacy_final_layer: bool = True
    full_attention: bool = False
    attention: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        counts = (
            "in_channels",
            "hidden_size",
            "depth",
            "num_heads",
            "caption_channels",
            "model_max_length",
        )
        self._check_positive(*counts, "mlp_ratio")
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ValueError(
                f"got patch_size {self.patch_size}; expected (frames, height, width) >= 1; change it"
            )
        if self.hidden_size % self.num_heads or (
            self.rotary and self.hidden_size // self.num_heads % 2
        ):
            what = "an even hidden_size / num_heads (rotary embedding turns pairs of channels)"
            raise ValueError(
                f"got hidden_size {self.hidden_size} and num_heads {self.num_heads}; expected "
                f"{what if self.rotary else 'num_heads to divide hidden_size'}; change one of the two"
            )
        if self.hidden_size % 4:
            raise ValueError(
                f"got hidden_size {self.hidden_size}; expected a multiple of 4 (sines and cosines of a patch's column "
                "and row); choose another hidden_size"
            )
        check_backend(self.attention)
        for name in ("class_dropout_prob", "drop_path"):
            if not 0 <= (rate := getattr(self, name)) < 1:
                raise ValueError(
                    f"got {name} {rate}; expected a rate in [0, 1); choose a smaller one"
                )

    def to_dict(self) -> dict[str, Any]:
        """The arguments by name, as ``transformers`` and ``peft`` ask a model's ``config`` for them."""
        return asdict(self)

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"got {name} {getattr(self, name)}; expected a positive number; change it"
                )

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.pred_sigma else 1)

    @property
    def window(self) -> tuple[int, int] | None:
        """Height and width of the windows of temporal attention, in patches; None where there are none."""
        return None

    def grid(self, num_samples: int, latent_size: tuple[int, int, int], **more: Any) -> PatchGrid:
        """The patches of a batch of such latents, as the model sees them."""
        return PatchGrid(
            num_samples, latent_size, self.patch_size, self.window, self.full_attention, **more
        )


@dataclass(frozen=True)
class Text:
    """Captions as the blocks take them. What ``encode_text`` has made serves any number of calls of the model.

    ``keys`` are the keys and values ``[N, 2 * C]`` of each cross-attention, where they have been computed ahead.
    """

    tokens: Tensor  # [N, C], packed
    lengths: Sequence[int]  # tokens of each sample
    keys: Mapping[nn.Module, Tensor] = field(default_factory=dict)

    @property
    def shared_form(self) -> str:
        """What ranks that share a batch hold alike. Lengths are no part of it: a rank needs the captions of its own
        tokens alone, and text is not sent."""
        dtype = str(self.tokens.dtype).removeprefix("torch.")
        keys = f", keys of {len(self.keys)} blocks" if self.keys else ""
        return (
            f"Text of {len(self.lengths)} captions, {self.tokens.shape[1]} channels {dtype}{keys}"
        )


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What the tokens of one layout's rows are conditioned on; computed once, shared by all blocks."""

    rows: Rows
    modulation: Tensor  # [B, m, k, C], in at least fp32: gradients of all blocks are summed in it
    given: Tensor | None  # [B, 1 or T, 1 or T, 1] bool: True for frames that are given (timestep 0)
    dtype: torch.dtype  # that tokens are computed in
    text: Tensor  # [N, C], packed
    lengths: Packing  # tokens held and text tokens that belong together
    order: (
        Tensor | None
    )  # [R * L] int64: the tokens as ``lengths`` counts them, where they do not lie so
    keys: Mapping[nn.Module, Tensor]  # see ``Text``
    turns: Tensor | None = (
        None  # by which a rotary embedding turns queries and keys of self-attention
    )

    @classmethod
    def of(
        cls,
        rows: Rows,
        modulation: Tensor,
        given: Tensor | None,
        text: Text,
        apart: Sequence[int] = (),
        rope: RotaryEmbedding | None = None,
        in_frame: bool = False,
    ) -> Condition:
        """Lay the conditions of a batch out over the rows held here.

        ``given`` ``[B, T]`` marks given frames. There is a text for each sample, and where the frames ``apart`` have
        one of their own, a second for each sample behind these. ``rope`` turns queries and keys, for attention
        within a frame or over frames.
        """
        if given is not None:
            given = given[:, :, None, None] if rows.layout == SPATIAL else given[:, None, :, None]
        tokens, order = rows.tokens_per_sample(), None
        if apart:
            frames = rows.frames(modulation.device).expand(rows.count, rows.length)
            is_apart = torch.isin(
                frames, to_device(torch.tensor(apart), modulation.device)
            )  # [R, L]
            order = is_apart.flatten().argsort(stable=True)
            of_apart = rows.tokens_per_sample(apart)
            tokens = [n - of for n, of in zip(tokens, of_apart, strict=True)] + of_apart
        return cls(
            rows=rows,
            modulation=modulation.to(torch.promote_types(modulation.dtype, torch.float32)),
            given=given,
            dtype=modulation.dtype,
            text=text.tokens,
            lengths=Packing(tokens, text.lengths),
            order=order,
            keys=text.keys,
            turns=None if rope is None else rope.turns(rows, in_frame, modulation.device),
        )

    def per_token(self, table: Tensor, *, ignore_mask: bool = False) -> tuple[Tensor, ...]:
        """A table ``[B, m, k, C]`` for the tokens held: k tensors ``[b, 1 or n, 1 or L, C]``.

        With ``ignore_mask`` all frames take what belongs to their sample's timestep, ``[b, 1, 1, C]`` where samples
        are held whole.
        """
        states = table[:, :, None, None].unbind(1)  # m of [B, 1, 1, k, C]
        chosen = states[0]
        if self.given is not None and not ignore_mask:
            chosen = torch.where(
                self.given[..., None], states[1], chosen
            )  # [B, 1 or T, 1 or T, k, C]
        return self.rows.spread(chosen.to(self.dtype)).unbind(-2)

    def entries(
        self, table: Tensor, first: int, keep: Tensor | None, *, ignore_mask: bool = False
    ) -> tuple[Tensor, ...]:
        """A block's own ``table`` ``[n, C]`` added to n entries of the modulation from ``first``, per token.

        ``keep`` ``[B]`` is multiplied into the gates among them (drop-path).
        """
        table = table + self.modulation[:, :, first : first + len(table)]  # [B, m, n, C]
        if keep is not None:
            is_gate = torch.arange(first, first + table.shape[2], device=table.device) % 3 == GATE
            table = table * torch.where(is_gate, keep[:, None], 1).to(table)[:, None, :, None]
        return self.per_token(table, ignore_mask=ignore_mask)


def sample_numbers(
    names: Iterable[str], *, height: Tensor, width: Tensor, fps: Tensor, num_frames: int
) -> dict[str, Tensor]:
    """The numbers of a sample that a model takes (its ``sample_inputs``), ``[B]`` each.

    Sizes are pixels and frames of the video, ``ar`` is height / width; images have 120 frames per second, as released.
    """
    known = dict(
        height=height,
        width=width,
        ar=height / width,
        num_frames=torch.full_like(height, num_frames),
    )
    known["fps"] = fps if num_frames > 1 else torch.full_like(fps, IMAGE_FPS)
    return {name: known[name] for name in names}


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` of tokens ``[R, L, C]``, with entries ``[b, 1 or n, 1 or L, C]``."""
    return torch.addcmul(shift, _by_sample(x, shift), 1 + scale).flatten(0, 1)


def add_gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """``x + gate * branch`` of tokens ``[R, L, C]``, with an entry ``[b, 1 or n, 1 or L, C]``."""
    x, branch = _by_sample(x, gate), _by_sample(branch, gate)
    return torch.addcmul(x, gate, branch).flatten(0, 1)


def _by_sample(x: Tensor, entry: Tensor) -> Tensor:
    """Tokens ``[R, L, C]`` as ``[b, n, L, C]``, against which an entry is broadcast."""
    return x.unflatten(0, (len(entry), len(x) // len(entry)))


class ModulatedBlock(nn.Module):
    """What all blocks hold: self-attention over a row, cross-attention to text, MLP; the first and last modulated by
    the timestep (adaLN). The modulation starts with three entries of the attention and three of the MLP."""

    def __init__(
        self,
        config: SharedConfig,
        *,
        qk_norm: bool,
        rope: RotaryEmbedding | None = None,
        in_frame: bool = False,
    ) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = SelfAttention(width, heads, qk_norm=qk_norm, rope=rope, in_frame=in_frame)
        self.cross_attn = CrossAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.rowwise = Rowwise()

    def attend(self, x: Tensor, condition: Condition, keep: Tensor | None) -> Tensor:
        """The self-attention branch, ``[R, L, C]`` -> ``[R, L, C]``."""
        shift, scale, gate = condition.entries(self.scale_shift_table[:3], 0, keep)
        attended = self.attn(modulate(self.norm1(x), shift, scale), condition.rows, condition.turns)
        return add_gated(x, gate, attended)

    def finish(self, x: Tensor, condition: Condition, keep: Tensor | None) -> Tensor:
        """Cross-attention and the MLP branch, ``[R, L, C]`` -> ``[R, L, C]``; the latter some rows at a time."""
        x = x + self.cross_attn(
            x,
            condition.text,
            condition.lengths,
            order=condition.order,
            keys=condition.keys.get(self.cross_attn),
            backend=condition.rows.grid.attention,
        )
        shift, scale, gate = condition.entries(self.scale_shift_table[3:], 3, keep)
        return self.rowwise(self._feed_forward, condition.rows, x, shift, scale, gate)

    def _feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return add_gated(x, gate, self.mlp(modulate(self.norm2(x), shift, scale)))


class FinalLayer(nn.Module):
    """Norm, modulation and projection of a token to the channels of its patch."""

    def __init__(self, width: int, out_width: int, *, legacy: bool) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, out_width)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.legacy = legacy

    @classmethod
    def of(cls, config: SharedConfig) -> FinalLayer:
        patch_volume = math.prod(config.patch_size)
        return cls(
            config.hidden_size, patch_volume * config.out_channels, legacy=config.legacy_final_layer
        )

    def forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Rows ``[R, L, C]`` and timestep embeddings ``[B, m, C]`` -> ``[R, L, V * C_out]``."""
        table = self.scale_shift_table + t[:, :, None]  # [B, m, 2, C]
        if condition.given is None or not self.legacy:
            return self.linear(modulate(self.norm_final(x), *condition.per_token(table)))
        timed = condition.per_token(table, ignore_mask=True)
        timed_x = modulate(self.norm_final(x), *timed)  # what frames with the sample's timestep see
        twice = modulate(self.norm_final(timed_x), *condition.per_token(table))
        given = condition.rows.spread(condition.given)  # [b, 1 or n, 1 or L, 1]
        return self.linear(
            torch.where(given, _by_sample(twice, given), _by_sample(timed_x, given)).flatten(0, 1)
        )
