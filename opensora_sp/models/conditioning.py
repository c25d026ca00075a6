"""What the STDiT models share: configuration, what a token is conditioned on, a block's branches, the final layer.

A model holds its tokens as rows and runs through pairs of a spatial and a temporal part (``run_pairs``), each a segment
of its own for recomputation, with a switch between any two. Whatever depends on the rows held is laid out over them
once per layout (``Condition``) and shared by all blocks.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask), k
entries of a modulation (shift, scale and gate of each branch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention import check_backend
from .compile import compiled
from .groups import VideoMask
from .layers import CaptionEmbedder, CrossAttention, Mlp, PatchEmbed3D, RotaryEmbedding, SelfAttention
from .points import Gather, Rowwise, Segment, Shard, Switch
from .pretrained import Pretrained
from .rows import PatchGrid, Rows

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
        counts = ("in_channels", "hidden_size", "depth", "num_heads", "caption_channels", "model_max_length")
        self._check_positive(*counts, "mlp_ratio")
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ValueError(f"got patch_size {self.patch_size}; expected (frames, height, width) >= 1; change it")
        if self.hidden_size % self.num_heads or (self.rotary and self.hidden_size // self.num_heads % 2):
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
                raise ValueError(f"got {name} {rate}; expected a rate in [0, 1); choose a smaller one")

    def to_dict(self) -> dict[str, Any]:
        """The arguments by name, as ``transformers`` and ``peft`` ask a model's ``config`` for them."""
        return asdict(self)

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"got {name} {getattr(self, name)}; expected a positive number; change it")

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.pred_sigma else 1)

    @property
    def window(self) -> tuple[int, int] | None:
        """Height and width of the windows of temporal attention, in patches; None where there are none."""
        return None

    def grid(self, num_samples: int, latent_size: tuple[int, int, int], **more: Any) -> PatchGrid:
        """The patches of a batch of such latents, as the model sees them."""
        return PatchGrid(num_samples, latent_size, self.patch_size, self.window, self.full_attention, **more)


@dataclass(frozen=True)
class Text:
    """Captions as the blocks take them. What ``encode_text`` has made serves any number of calls of the model.

    ``keys`` are the keys and values ``[N, 2 * C]`` of each cross-attention, where they have been computed ahead.
    """

    tokens: Tensor  # [N, C], packed
    lengths: Sequence[int]  # tokens of each sample
    keys: Mapping[nn.Module, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What the tokens of one layout's rows are conditioned on; computed once, shared by all blocks."""

    rows: Rows
    modulation: Tensor  # [B, m, k, C]
    timed: Tensor  # [R, 1] int64: which entry of a table [B * m, ...] is that of a row's sample and its timestep
    state: Tensor  # [R, 1 or L] int64: which entry modulates these tokens
    masked: Tensor | None  # [R, 1 or L, 1] bool: True for tokens of frames that are given (timestep 0)
    text: Tensor  # [N, C], packed
    lengths: tuple[Sequence[int], Sequence[int]]  # tokens held and text tokens that belong together
    order: Tensor | None  # [R * L] int64: the tokens as ``lengths`` counts them, where they do not lie so
    keys: Mapping[nn.Module, Tensor]  # see ``Text``

    @classmethod
    def of(
        cls,
        rows: Rows,
        modulation: Tensor,
        given: Tensor | None,
        text: Text,
        apart: Sequence[int] = (),
    ) -> Condition:
        """Lay the conditions of a batch out over the rows held here.

        ``given`` ``[B, T]`` marks given frames. There is a text for each sample, and where the frames ``apart`` have
        one of their own, a second for each sample behind these.
        """
        timed = state = rows.samples(modulation.device)[:, None] * modulation.shape[1]  # [R, 1]
        masked = None
        if given is not None:
            masked = rows.frame_values(given)  # [R, 1 or T]
            state = timed + masked
            masked = masked[..., None]
        tokens, order = rows.tokens_per_sample(), None
        if apart:
            frames = rows.frames(modulation.device).expand(rows.count, rows.length)
            is_apart = torch.isin(frames, torch.tensor(apart, device=modulation.device))  # [R, L]
            order = is_apart.flatten().argsort(stable=True)
            of_apart = rows.tokens_per_sample(apart)
            tokens = [n - of for n, of in zip(tokens, of_apart, strict=True)] + of_apart
        return cls(
            rows=rows,
            modulation=modulation,
            timed=timed,
            state=state,
            masked=masked,
            text=text.tokens,
            lengths=(tokens, text.lengths),
            order=order,
            keys=text.keys,
        )

    def per_token(self, table: Tensor, *, ignore_mask: bool = False) -> tuple[Tensor, ...]:
        """Spread a table ``[B, m, k, C]`` over the tokens: k tensors ``[R, 1 or L, C]``, one at a time.

        With ``ignore_mask`` all frames take what belongs to their sample's timestep, ``[R, 1, C]``.
        """
        state = self.timed if ignore_mask else self.state
        entries = table.flatten(0, 1).unbind(1)  # k of [B * m, C]
        return tuple(entry.index_select(0, state.flatten()).unflatten(0, state.shape) for entry in entries)

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
    known = dict(height=height, width=width, ar=height / width, num_frames=torch.full_like(height, num_frames))
    known["fps"] = fps if num_frames > 1 else torch.full_like(fps, IMAGE_FPS)
    return {name: known[name] for name in names}


def _check_device(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is not None and tensor.device != x.device:
        raise ValueError(
            f"got {name} on {tensor.device}; expected {x.device}, where x is; move it with .to({str(x.device)!r})"
        )


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, x, 1 + scale)


class ModulatedBlock(nn.Module):
    """What all blocks hold: self-attention over a row, cross-attention to text, MLP; the first and last modulated by
    the timestep (adaLN). The modulation starts with three entries of the attention and three of the MLP."""

    def __init__(
        self, config: SharedConfig, *, qk_norm: bool, rope: RotaryEmbedding | None = None, in_frame: bool = False
    ) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        backend = config.attention
        self.attn = SelfAttention(width, heads, qk_norm=qk_norm, rope=rope, in_frame=in_frame, backend=backend)
        self.cross_attn = CrossAttention(width, heads, backend=backend)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.rowwise = Rowwise()

    def attend(self, x: Tensor, condition: Condition, keep: Tensor | None) -> Tensor:
        """The self-attention branch, ``[R, L, C]`` -> ``[R, L, C]``."""
        shift, scale, gate = condition.entries(self.scale_shift_table[:3], 0, keep)  # [R, 1 or L, C] each
        return torch.addcmul(x, gate, self.attn(modulate(self.norm1(x), shift, scale), condition.rows))

    def finish(self, x: Tensor, condition: Condition, keep: Tensor | None) -> Tensor:
        """Cross-attention and the MLP branch, ``[R, L, C]`` -> ``[R, L, C]``; the latter some rows at a time."""
        keys = condition.keys.get(self.cross_attn)
        x = x + self.cross_attn(x, condition.text, condition.lengths, order=condition.order, keys=keys)
        shift, scale, gate = condition.entries(self.scale_shift_table[3:], 3, keep)  # [R, 1 or L, C] each
        return self.rowwise(self._feed_forward, condition.rows, x, shift, scale, gate)

    def _feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(x, gate, self.mlp(modulate(self.norm2(x), shift, scale)))


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
        return cls(config.hidden_size, patch_volume * config.out_channels, legacy=config.legacy_final_layer)

    def forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Rows ``[R, L, C]`` and timestep embeddings ``[B, m, C]`` -> ``[R, L, V * C_out]``."""
        table = self.scale_shift_table + t[:, :, None]  # [B, m, 2, C]
        if condition.masked is None or not self.legacy:
            return self.linear(modulate(self.norm_final(x), *condition.per_token(table)))
        timed = condition.per_token(table, ignore_mask=True)
        timed_x = modulate(self.norm_final(x), *timed)  # what frames with the sample's timestep see
        twice = modulate(self.norm_final(timed_x), *condition.per_token(table))
        return self.linear(torch.where(condition.masked, twice, timed_x))


class ConditionedModel(Pretrained, nn.Module):
    """Base of the STDiT models: their points, the run through their blocks, and what all of them are conditioned on.

    A subclass builds its embedders, blocks and final layer, in the order of the public checkpoints, and ``forward``.
    """

    Config: ClassVar[type[SharedConfig]]
    sharding_points: ClassVar[dict[str, str]]  # where sequence parallelism attaches itself
    sample_inputs: ClassVar[tuple[str, ...]] = ()  # numbers of a sample that forward takes, ``[B]`` each, by name
    config: SharedConfig
    x_embedder: PatchEmbed3D
    y_embedder: CaptionEmbedder

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpoint = False
        self.compile_backend: str | Callable[..., Any] | None = None  # see compile.py
        self.shard, self.switch, self.segment, self.gather = Shard(), Switch(), Segment(), Gather()

    def set_grad_checkpoint(self, enabled: bool = True) -> None:
        """Keep only the input of each part of a block in forward and recompute the part in backward."""
        self.grad_checkpoint = enabled

    @property
    def dtype(self) -> torch.dtype:
        return self.x_embedder.proj.weight.dtype

    def encode_text(self, y: Tensor, mask: Tensor | None = None, drop_caption: Tensor | None = None) -> Text:
        """Captions, with the keys and values of every block, for any number of calls: sampling asks the model about the
        same text at every step. Pass the result as ``y``, without ``mask`` and ``drop_caption``, which are as there."""
        self._check_text(len(y), y, mask, drop_caption)
        text = self._text(y, mask, drop_caption)
        blocks = (module for module in self.modules() if isinstance(module, CrossAttention))
        return replace(text, keys={block: block.kv_linear(text.tokens) for block in blocks})

    def run_pairs(
        self,
        pairs: Sequence[tuple[Callable[..., Tensor], Callable[..., Tensor]]],
        x: Tensor,
        condition_of: Callable[[Rows], Condition],
        rows: Rows,
        drop_path: Tensor | None,
    ) -> tuple[Tensor, Condition]:
        """Run tokens ``[R, S, C]`` in spatial rows through (spatial, temporal) parts ``part(x, condition, keep)``.

        Returns:
            ``[R, T, C]`` in temporal rows, and the condition of these.
        """
        keep = None if drop_path is None else self._branch_scales(drop_path)  # [2 * depth, B]
        spatial, temporal = condition_of(rows), None
        for i, (spatial_part, temporal_part) in enumerate(pairs):
            x = self._run(spatial_part, x, spatial, keep, 2 * i)  # [R, S, C]
            x, rows = self.switch(x, rows)  # [R, T, C], temporal rows
            temporal = temporal or condition_of(rows)
            x = self._run(temporal_part, x, temporal, keep, 2 * i + 1)  # [R, T, C]
            if i + 1 < len(pairs):
                x, rows = self.switch(x, rows)  # [R, S, C], spatial rows
        assert temporal is not None
        return x, temporal

    def _run(
        self, part: Callable[..., Tensor], x: Tensor, condition: Condition, keep: Tensor | None, index: int
    ) -> Tensor:
        if self.compile_backend is not None:
            part = compiled(part, self.compile_backend)
        return self.segment(
            part,
            condition.rows,
            x,
            condition,
            None if keep is None else keep[index],
            recompute=self.grad_checkpoint and torch.is_grad_enabled(),
            last=index == 2 * self.config.depth - 1,
        )

    def _branch_scales(self, drop_path: Tensor) -> Tensor:
        """What the branches of each part and sample are multiplied by, ``[2 * depth, B]``."""
        rates = torch.linspace(0, self.config.drop_path, self.config.depth, dtype=torch.float64)
        scales = (1 / (1 - rates)).repeat_interleave(2)[:, None].to(drop_path.device)
        return torch.where(drop_path, torch.zeros_like(scales), scales)

    def _grid(
        self,
        x: Tensor,
        video_mask: Tensor | None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        *,
        trained_at: int = 1,
    ) -> PatchGrid:
        """The patches of latents ``x``. The scale of positions is the side of a square as large as the first sample's
        pixels, as released, or with a mask as each sample's own, over ``trained_at``; without pixels it is 1."""
        scale = torch.ones(len(x), device=x.device)
        if height is not None and width is not None:
            scale = ((height.double() * width).sqrt() / trained_at).float().to(x.device)  # [B]
        mask = None if video_mask is None else VideoMask(video_mask, self.config.patch_size)
        frames, lines, columns = x.shape[2:]
        return self.config.grid(len(x), (frames, lines, columns), mask=mask, scale=scale if mask else scale[0])

    def _patches(self, x: Tensor, rows: Rows) -> Tensor:
        """The patches of the rows held, ``[R, L, V * c]``; whatever lies outside of its clip is zero."""
        patches = rows.slice(x)
        return (patches if rows.grid.mask is None else rows.clear_outside(patches)).to(self.dtype)

    def _leave(self, x: Tensor, rows: Rows) -> Tensor:
        """The final layer's rows ``[R, L, V * C_out]`` as latents, in at least float32; zero outside of the clips."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.gather(x if rows.grid.mask is None else rows.clear_outside(x), rows)

    def _times(self, timestep: Tensor, x_mask: Tensor | None) -> Tensor:
        """Each sample's timestep and, where frames may be given, the 0 that these see: ``[B, m]``."""
        return timestep[:, None] if x_mask is None else torch.stack([timestep, torch.zeros_like(timestep)], dim=1)

    def _given_frames(self, x_mask: Tensor | None) -> Tensor | None:
        """``[B, frames]``, False for given frames -> ``[B, T]``, True for given frames of patches."""
        if x_mask is None:
            return None
        patch = self.config.patch_size[0]
        of_patch = [x_mask[:, i::patch] for i in range(patch)]
        for later in of_patch[1:]:
            if not torch.equal(of_patch[0][:, : later.shape[1]], later):
                raise ValueError(
                    f"got an x_mask that differs inside a patch of {patch} frames; expected the {patch} frames of a "
                    "patch to agree; round the mask to whole patches"
                )
        return ~of_patch[0].bool()

    def _text(self, y: Tensor | Text, mask: Tensor | None, drop: Tensor | None) -> Text:
        return y if isinstance(y, Text) else Text(*self._embed_text(y, mask, drop))

    def _embed_text(self, y: Tensor, mask: Tensor | None, drop: Tensor | None) -> tuple[Tensor, list[int]]:
        """Text ``[N, C]``, packed, and each sample's number of tokens."""
        packed, lengths = self.y_embedder.pack(y, mask, drop)  # [N, Cy]
        return self.y_embedder(packed.to(self.dtype)), lengths

    def _check(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor | Text,
        mask: Tensor | None,
        x_mask: Tensor | None,
        drop_caption: Tensor | None,
        drop_path: Tensor | None,
        video_mask: Tensor | None,
    ) -> None:
        """Raise ValueError if shapes, dtypes or devices do not fit the configuration or each other."""
        config, n = self.config, x.shape[0]
        if x.ndim != 5 or x.shape[1] != config.in_channels:
            raise ValueError(
                f"got x of shape {tuple(x.shape)}; expected [B, {config.in_channels}, frames, height, width]; "
                "pass latents of the VAE that the model was configured for (in_channels)"
            )
        if not isinstance(y, Text):
            self._check_text(n, y, mask, drop_caption)
        elif len(y.lengths) != n or mask is not None or drop_caption is not None:
            raise ValueError(
                f"got encoded text of {len(y.lengths)} captions for {n} samples, or a mask or drop_caption with it; "
                "expected one caption per sample and neither; pass both to encode_text"
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
            if tensor is not None and name != "timestep" and tensor.dtype != torch.bool:
                raise ValueError(f"got {name} of {tensor.dtype}; expected torch.bool; pass {name}.bool()")
        caption = y.tokens if isinstance(y, Text) else y
        for name, tensor in dict(timestep=timestep, y=caption, x_mask=x_mask).items():
            _check_device(name, tensor, x)
        if video_mask is not None:
            self._check_video_mask(x, video_mask)

    def _check_video_mask(self, x: Tensor, mask: Tensor) -> None:
        wanted = (x.shape[0], *x.shape[2:])
        if tuple(mask.shape) != wanted or mask.dtype != torch.bool or mask.device != x.device:
            raise ValueError(
                f"got a video_mask of shape {tuple(mask.shape)}, {mask.dtype} on {mask.device}; expected "
                f"{list(wanted)}, torch.bool on {x.device}: True where a position of a latent lies inside of its clip; "
                "pass such a mask, or None if no clip is padded"
            )

    def _check_text(self, n: int, y: Tensor, mask: Tensor | None, drop_caption: Tensor | None) -> None:
        config = self.config
        if y.ndim != 4 or y.shape[0] != n or y.shape[1] != 1 or y.shape[3] != config.caption_channels:
            raise ValueError(
                f"got y of shape {tuple(y.shape)}; expected [{n}, 1, L, {config.caption_channels}]; "
                "check the text encoder and caption_channels"
            )
        if y.shape[2] > config.model_max_length:
            raise ValueError(
                f"got {y.shape[2]} text tokens; expected at most model_max_length = {config.model_max_length}; "
                "truncate the text or raise model_max_length"
            )
        if mask is None:
            return
        samples, *ones = mask.shape[:-1] or (0,)
        if samples < 1 or n % samples or ones not in ([], [1, 1]) or mask.shape[-1] != y.shape[2]:
            raise ValueError(
                f"got a text mask of shape {tuple(mask.shape)}; expected [{n}, {y.shape[2]}]; pass one row per sample"
            )
        if mask.is_floating_point() or mask.is_complex():
            raise ValueError(
                f"got a text mask of {mask.dtype}; expected bool or integers, 1 for tokens in use, not numbers to add "
                "to scores; pass mask.bool(), or (mask == 0) for one that is added"
            )
        _check_device("text mask", mask, y)

    def _initialize(self, embedders: Iterable[nn.Module], zero: Iterable[nn.Linear]) -> None:
        """As the released models began: Xavier weights, small ones in ``embedders``, none in the layers ``zero``."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        for embedder in embedders:
            for linear in embedder.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=0.02)
        for linear in zero:
            nn.init.zeros_(linear.weight)
