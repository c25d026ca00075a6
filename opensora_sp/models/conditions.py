"""Conditions of the tokens of the STDiT models: timestep, conditioning frames and text.

``Conditioning`` holds it for a batch. ``Condition`` is the same laid out over the local rows,
once for all spatial and once for all temporal blocks.

Conditioning frames are given in two ways. Where ``x_mask`` is False, x holds them without noise,
and their modulation is of timestep 0 (``Condition.frames``). Of Open-Sora 1.3, ``cond`` is added to
the tokens, and the frames in ``mask_index`` attend to another caption (``null_frames``).

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R local
rows, L tokens of a row (S or T), N packed text tokens, m modulation states of a sample (1, or 2
with conditioning frames), k entries of a modulation (shift, scale and gate of each branch),
b samples of n rows (``Rows.expand_to_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.common.tensors import to_device

from .kernels import fused
from .packing import Packing, RowTables
from .positions import RotaryEmbedding
from .token_layout import SPATIAL, Rows

IMAGE_FPS = 120.0
# Of a branch in a modulation: shift, scale and gate.
ENTRIES = 3
# Bytes of the tables of all blocks together.
MAX_TABLES = 1 << 26


@dataclass(frozen=True)
class Text:
    """Encoded captions. A result of ``encode_text`` serves any number of calls of the model.

    Attributes:
        tokens: ``[N, C]``, packed.
        lengths: tokens of each sample, host integers.
        keys_values: keys and values ``[N, 2 * C]`` of each cross-attention, if precomputed.
    """

    tokens: Tensor
    lengths: Sequence[int]
    keys_values: Mapping[nn.Module, Tensor] = field(default_factory=dict)

    def followed_by(self, other: Text) -> Text:
        """The captions of both, of ``other`` last."""
        return Text(torch.cat([self.tokens, other.tokens]), [*self.lengths, *other.lengths])

    def of_samples(self, samples: Sequence[int]) -> Text:
        """The captions of these samples, whose numbers ascend."""
        if len(samples) == len(self.lengths):
            return self

        def cut(tokens: Tensor) -> Tensor:
            # Split at once: the gradient of each slice would be as large as the whole text.
            captions = tokens.split([*self.lengths])
            return torch.cat([captions[i] for i in samples])

        keys_values = {block: cut(both) for block, both in self.keys_values.items()}
        return Text(cut(self.tokens), [self.lengths[i] for i in samples], keys_values)

    def of_rows(self, rows: Rows, tokens: Sequence[int] | None = None) -> RowText:
        """For cross-attention of the local rows: the captions of samples with local tokens.

        ``tokens``: local tokens of each caption, by default of its sample.
        """
        tokens = rows.tokens_per_sample() if tokens is None else tokens
        # At least one, for its gradient.
        samples = [sample for sample, count in enumerate(tokens) if count] or [0]
        text = self.of_samples(samples)
        packing = Packing([tokens[sample] for sample in samples], text.lengths)
        return RowText(text.tokens, packing, text.keys_values)

    @property
    def shared_form(self) -> str:
        """The description that must be equal on the ranks that share a batch.

        Lengths may differ: a rank needs the captions of local tokens alone, and text is not sent.
        """
        dtype = str(self.tokens.dtype).removeprefix("torch.")
        keys = f", keys of {len(self.keys_values)} blocks" if self.keys_values else ""
        return (
            f"Text of {len(self.lengths)} captions, {self.tokens.shape[1]} channels {dtype}{keys}"
        )


@dataclass(frozen=True)
class RowText:
    """What the local tokens attend to in cross-attention.

    Attributes:
        tokens: ``[N, C]``, packed, of the samples with local tokens.
        packing: numbers of local tokens and of these that belong together.
        keys_values: see ``Text``.
    """

    tokens: Tensor
    packing: Packing
    keys_values: Mapping[nn.Module, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The conditions of the tokens in one layout's rows, shared by all blocks.

    Attributes:
        rows: the local rows.
        modulation: ``[B, m, n, C]`` each, of as many entries as are read at once: of each branch
            its shift, scale and gate. In at least fp32, since the gradients of all blocks are
            summed in it.
        frames: bool ``[B, 1 or T, 1 or T, 1]``, True for conditioning frames (timestep 0).
        dtype: the dtype that tokens are computed in.
        text: the captions of the samples with local tokens.
        order: int64 ``[R * L]``, the tokens in the order of the text, if they do not lie in it.
        row_tables: what self-attention reads of the local rows.
        part: which rows the local ones are of the samples that ``entries`` are of, for functions of
            ``kernels.fused``. None where entries belong to the local rows.
        extra: what a model's ``lay_out`` has made of its ``extra_inputs`` for these rows, by name.
        per_frame: modulation states differ between frames, ``[B, m * T, n, C]``.
        block_keys_values: keys and values of the block that runs (``of_block``).
    """

    rows: Rows
    modulation: tuple[Tensor, ...]
    frames: Tensor | None
    dtype: torch.dtype
    text: RowText
    order: Tensor | None
    row_tables: RowTables
    part: fused.Part | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    per_frame: bool = False
    block_keys_values: Tensor | None = None

    def of_block(self, block: Any) -> Condition:
        """The condition with the keys and values of this block alone, if precomputed."""
        if not self.text.keys_values:
            return self
        # A compiled graph that looks its block up in a dict would serve that block alone.
        keys_values = self.text.keys_values.get(block.cross_attn)
        text = replace(self.text, keys_values={})
        return replace(self, text=text, block_keys_values=keys_values)

    def per_token(self, table: Tensor, *, ignore_frames: bool = False) -> tuple[Tensor, ...]:
        """A table ``[B, m, k, C]`` for the local tokens: k tensors ``[b, 1 or n, 1 or L, C]``.

        With ``ignore_frames`` all frames take the state of their sample's timestep,
        ``[b, 1, 1, C]`` where samples are whole. With a ``part`` they are entries of whole samples,
        in which kernels find a token's.
        """
        # By views: the backward of an index with slices fills a tensor with zeros for each.
        if self.per_frame:
            table = table.unflatten(1, (-1, self.rows.grid.frames))
            table = table.unsqueeze(3 if self.rows.layout == SPATIAL else 2)
        else:
            table = table.unsqueeze(2).unsqueeze(2)  # [B, m, 1 or T, 1 or T, k, C]
        # The backward of unbind is a copy, of a single state as well.
        states = (table.squeeze(1),) if table.shape[1] == 1 else table.unbind(1)

        if self.frames is None or ignore_frames:
            chosen = states[0]
        else:
            # For each frame: [B, 1 or T, 1 or T, k, C].
            chosen = torch.where(self.frames[..., None], states[1], states[0])

        if self.part is not None:
            # Kernels read entries in any dtype.
            samples = self.rows.local_samples
            if samples.stop - samples.start < len(chosen):
                chosen = chosen[samples]
            return chosen.unbind(-2)
        return self.rows.expand_to_rows(chosen.to(self.dtype)).unbind(-2)

    def entries(
        self, table: Tensor, first: int, scale: Tensor | None, *, ignore_frames: bool = False
    ) -> tuple[Tensor, ...]:
        """A block's ``table`` added to n entries of the modulation, per token.

        Args:
            table: ``[n, C]``, or ``[B, m, n, C]`` where they are added already.
            first: the first of these entries.
            scale: ``[B]``, multiplied into the gates among them (drop-path).
        """
        if table.ndim == 2:
            number, skipped = divmod(first, self.modulation[0].shape[2])
            modulation = self.modulation[number]
            if len(table) < modulation.shape[2]:
                modulation = modulation[:, :, skipped : skipped + len(table)]
            # Of as many dims: the gradient of one state of one sample is no sum.
            table = table[None, None] + modulation  # [B, m, n, C]
        if scale is not None:
            factors = table.new_ones(len(table), 1, table.shape[2], 1)
            first_gate = ENTRIES - 1 - first % ENTRIES
            factors[:, :, first_gate::ENTRIES] = scale[:, None, None, None].to(table)
            table = table * factors
        return self.per_token(table, ignore_frames=ignore_frames)


def _part_of_samples(rows: Rows) -> fused.Part:
    first_sample = rows.local_samples.start
    return fused.Part(first=rows.start - first_sample * rows.per_sample, rows=rows.per_sample)


def _null_frames_last(rows: Rows, null_frames: Sequence[int], device: torch.device) -> Tensor:
    """The local tokens, ``null_frames`` after all others, int64 ``[R * L]``."""
    numbers = to_device(torch.tensor(null_frames), device)
    is_null = torch.isin(rows.frames(device), numbers).expand(rows.count, rows.length)
    return is_null.flatten().argsort(stable=True)


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a batch is conditioned on.

    Attributes:
        modulation: ``[B, m, k, C]``; ``per_frame`` ``[B, m * T, k, C]``, a state for each frame.
        frames: bool ``[B, T]``, True for conditioning frames.
        text: one caption for each sample. With ``null_frames`` a second one for each sample follows
            these; the frames of these numbers attend to it instead.
        at_once: how many entries of the modulation a part of a block reads; None for all.
        spatial_rope, temporal_rope: rotate queries and keys, within a frame or over frames.
        lay_out: makes ``Condition.extra`` of the local rows, once for each layout.
    """

    modulation: Tensor
    frames: Tensor | None
    text: Text
    null_frames: Sequence[int] = ()
    spatial_rope: RotaryEmbedding | None = None
    temporal_rope: RotaryEmbedding | None = None
    at_once: int | None = None
    per_frame: bool = False
    lay_out: Callable[[Rows], Mapping[str, Any]] | None = None
    _conditions: dict[str, Condition] = field(default_factory=dict, init=False)

    def tables(self, block_tables: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The modulation of each block, ``[B, m, k, C]``, by the blocks' tables ``[k, C]``.

        All are added at once. In backward, too, one sum stands for an addition and a cast of each
        block. As they are kept till the end of backward, there are none (None for each block) where
        they take more than ``MAX_TABLES`` bytes: then a block adds its own.
        """
        wide = torch.promote_types(self.modulation.dtype, torch.float32)
        if len(block_tables) * self.modulation.numel() * wide.itemsize > MAX_TABLES:
            return [None] * len(block_tables)
        return (torch.stack([*block_tables])[:, None, None] + self.modulation.to(wide)).unbind()

    def of(self, layout: str, rows: Rows) -> Condition:
        """The conditions of the local rows, for attention in this layout; computed once for each.

        ``layout`` says where tokens attend, and ``rows`` where they lie, which differ under
        strategies that leave tokens where they are. The rows of a layout are the same all along.
        """
        if layout not in self._conditions:
            in_frame, rotation = layout == SPATIAL, None
            rope = self.spatial_rope if in_frame else self.temporal_rope
            if rope is not None:
                rotation = rope.rotation(rows, in_frame, self.modulation.device)
            self._conditions[layout] = self._of_rows(rows, rotation)
        return self._conditions[layout]

    def _of_rows(self, rows: Rows, rotation: Tensor | None) -> Condition:
        modulation, frames, by_row = self.modulation, self.frames, rows.layout == SPATIAL
        wide = torch.promote_types(modulation.dtype, torch.float32)
        if frames is not None:
            frames = frames[:, :, None, None] if by_row else frames[:, None, :, None]

        tokens, order = rows.tokens_per_sample(), None
        if self.null_frames:
            order = _null_frames_last(rows, self.null_frames, modulation.device)
            null_tokens = rows.tokens_per_sample(self.null_frames)
            tokens = [n - null for n, null in zip(tokens, null_tokens, strict=True)] + null_tokens

        return Condition(
            rows=rows,
            # Cut once for all blocks: the backward of each cut fills a tensor with zeros.
            modulation=modulation.to(wide).split(self.at_once or modulation.shape[2], dim=2),
            frames=frames,
            dtype=modulation.dtype,
            # Blocks project the captions of local tokens only.
            text=self.text.of_rows(rows, tokens),
            order=order,
            row_tables=RowTables(rotation, rows.local_groups),
            part=_part_of_samples(rows) if fused.chosen("modulation", modulation) else None,
            extra={} if self.lay_out is None else self.lay_out(rows),
            per_frame=self.per_frame,
        )


def sample_numbers(
    names: Iterable[str], *, height: Tensor, width: Tensor, fps: Tensor, num_frames: int
) -> dict[str, Tensor]:
    """The numbers of a sample that a model takes (its ``sample_inputs``), ``[B]`` each.

    Sizes are pixels and frames of the video, ``ar`` is height / width. Images have 120 frames per
    second, as released.
    """
    numbers = dict(
        height=height,
        width=width,
        ar=height / width,
        num_frames=torch.full_like(height, num_frames),
        fps=fps if num_frames > 1 else torch.full_like(fps, IMAGE_FPS),
    )
    return {name: numbers[name] for name in names}
