"""The base of the STDiT models: their points, the run through their blocks, and the checks of what they are given.

A model holds its tokens as rows and runs through pairs of a spatial and a temporal part (``run_pairs``), each a segment
of its own for recomputation, with a switch between any two.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R rows held here, L tokens of a
row (S or T), V patch volume, N packed text tokens, m modulation states of a sample (1, or 2 with a frame mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensora_sp.transfer import to_device

from .attention import choose_backend
from .compile import compiled
from .conditioning import Condition, SharedConfig, Text
from .hook_points import Gather, Segment, Shard, Switch
from .layers import CaptionEmbedder, CrossAttention, PatchEmbed3D
from .pretrained import Pretrained
from .token_groups import VideoMask
from .token_layout import PatchGrid, Rows


class ConditionedModel(Pretrained, nn.Module):
    """Base of the STDiT models: their points, the run through their blocks, and what all of them are conditioned on.

    A subclass builds its embedders, blocks and final layer, in the order of the public checkpoints, and ``forward``.
    """

    Config: ClassVar[type[SharedConfig]]
    sharding_points: ClassVar[dict[str, str]]  # where sequence parallelism attaches itself
    sample_inputs: ClassVar[
        tuple[str, ...]
    ] = ()  # numbers of a sample that forward takes, ``[B]`` each, by name
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

    def encode_text(
        self, y: Tensor, mask: Tensor | None = None, drop_caption: Tensor | None = None
    ) -> Text:
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
        condition_of: Callable[[Rows, bool], Condition],
        rows: Rows,
        drop_path: Tensor | None,
    ) -> tuple[Tensor, Condition]:
        """Run tokens ``[R, S, C]`` in spatial rows through (spatial, temporal) parts ``part(x, condition, keep)``.

        ``condition_of(rows, in_frame)`` lays conditions out over rows, for spatial parts (``in_frame``) or temporal.

        Returns:
            ``[R, T, C]`` in temporal rows, and the condition of these.
        """
        keep = None if drop_path is None else self._branch_scales(drop_path)  # [2 * depth, B]
        spatial, temporal = condition_of(rows, True), None
        for i, (spatial_part, temporal_part) in enumerate(pairs):
            x = self._run(spatial_part, x, spatial, keep, 2 * i)  # [R, S, C]
            x, rows = self.switch(x, rows)  # [R, T, C], temporal rows
            temporal = temporal or condition_of(rows, False)
            x = self._run(temporal_part, x, temporal, keep, 2 * i + 1)  # [R, T, C]
            if i + 1 < len(pairs):
                x, rows = self.switch(x, rows)  # [R, S, C], spatial rows
        assert temporal is not None
        return x, temporal

    def _run(
        self,
        part: Callable[..., Tensor],
        x: Tensor,
        condition: Condition,
        keep: Tensor | None,
        index: int,
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
        scales = to_device((1 / (1 - rates)).repeat_interleave(2)[:, None], drop_path.device)
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
        if mask and len(scale) != len(x):
            raise ValueError(
                f"got height and width of {len(scale)} samples with the video_mask of {len(x)}; expected those of "
                "each, which set the positions in its clip; pass one entry per sample"
            )
        frames, lines, columns = x.shape[2:]
        config, size = self.config, (frames, lines, columns)
        backend = choose_backend(
            config.attention, x.device, self.dtype, config.hidden_size // config.num_heads
        )
        return config.grid(
            len(x), size, mask=mask, scale=scale if mask else scale[0], attention=backend
        )

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
        return (
            timestep[:, None]
            if x_mask is None
            else torch.stack([timestep, torch.zeros_like(timestep)], dim=1)
        )

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

    def _embed_text(
        self, y: Tensor, mask: Tensor | None, drop: Tensor | None
    ) -> tuple[Tensor, list[int]]:
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
        self._check_caption(n, y, mask, drop_caption)
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
                raise ValueError(
                    f"got {name} of {tensor.dtype}; expected torch.bool; pass {name}.bool()"
                )
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

    def _check_caption(
        self, n: int, y: Tensor | Text, mask: Tensor | None, drop_caption: Tensor | None
    ) -> None:
        if not isinstance(y, Text):
            self._check_text(n, y, mask, drop_caption)
        elif len(y.lengths) != n or mask is not None or drop_caption is not None:
            raise ValueError(
                f"got encoded text of {len(y.lengths)} captions for {n} samples, or a mask or drop_caption with it; "
                "expected one caption per sample and neither; pass both to encode_text"
            )

    def _check_text(
        self, n: int, y: Tensor, mask: Tensor | None, drop_caption: Tensor | None
    ) -> None:
        config = self.config
        if (
            y.ndim != 4
            or y.shape[0] != n
            or y.shape[1] != 1
            or y.shape[3] != config.caption_channels
        ):
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
        if mask.device.type != "cpu":  # where lengths are known without waiting for a device
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


def _check_device(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is not None and tensor.device != x.device:
        raise ValueError(
            f"got {name} on {tensor.device}; expected {x.device}, where x is; move it with .to({str(x.device)!r})"
        )
