"""Configurations of the STDiT models. Each class checks its values against each other.

Names as in the public checkpoints' ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from .attention_table import Sequences, names_by_kind
from .token_layout import SPATIAL, TEMPORAL, PatchGrid


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """Constructor arguments of all STDiT models, named as in the public ``config.json``.

    ``class_dropout_prob`` and ``drop_path`` are rates for the training run, which draws the samples
    and passes them to ``forward``. ``drop_path`` grows linearly over the depth, and kept branches
    are scaled by ``1 / (1 - rate)``.
    ``legacy_final_layer`` keeps the final layer of the released models, which modulates
    conditioning frames twice. With ``full_attention`` all tokens of a clip attend to each other in
    every self-attention, as in Open-Sora-Plan 1.2.
    ``attention`` names the kernel, one of ``attention_table.NAMES``, or a kernel for each kind:
    ``dict(spatial=..., temporal=..., cross=...)``, "auto" for those left out. It is no property of
    the weights.

    Raises:
        ValueError: if a value is out of range or does not fit another one.
    """

    # Whether a rotary embedding turns pairs of channels.
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
    attention: str | dict[str, str] = field(default="auto", hash=False)

    @property
    def num_blocks(self) -> int:
        """Blocks that gradient checkpointing may recompute, each or in two parts."""
        return self.depth

    @property
    def alternates(self) -> bool:
        """True if there are temporal blocks as well as spatial ones."""
        return not getattr(self, "skip_temporal", False)

    def __post_init__(self) -> None:
        self._check_positive("in_channels", "hidden_size", "depth", "num_heads", "mlp_ratio")
        self._check_positive("caption_channels", "model_max_length")
        self._check_rates("class_dropout_prob", "drop_path")
        names_by_kind(self.attention)

        self._make_tuple("patch_size")
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ValueError(
                f"got patch_size {self.patch_size}; expected (frames, height, width) >= 1; "
                "change it"
            )
        self._check_width()

    @classmethod
    def implied_by(cls, released: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Settings implied by the keys of a public checkpoint's ``config.json``, and the reason.

        Open-Sora writes every key of its version, so the keys identify the version.
        """
        return {}, ""

    def to_dict(self) -> dict[str, Any]:
        """The arguments by name, as ``transformers`` and ``peft`` read a model's ``config``."""
        return asdict(self)

    @property
    def out_channels(self) -> int:
        """Channels of the prediction: twice a latent's if the variance is predicted, too."""
        return self.in_channels * (2 if self.pred_sigma else 1)

    @property
    def window(self) -> tuple[int, int] | None:
        """Height and width in patches of the windows of temporal attention, if it has any."""
        kernel_size = getattr(self, "kernel_size", None)
        return None if kernel_size is None else kernel_size[:2]

    def grid(self, num_samples: int, latent_size: tuple[int, int, int], **more: Any) -> PatchGrid:
        """The patches of a batch of latents of size (frames, height, width)."""
        return PatchGrid(
            num_samples, latent_size, self.patch_size, self.window, self.full_attention, **more
        )

    def sequences(self, grid: PatchGrid, dtype: torch.dtype) -> dict[str, Sequences]:
        """What attends to what in a batch, by kind of attention that there is."""
        head_width = self.hidden_size // self.num_heads
        by_kind = {}
        for layout in (SPATIAL, TEMPORAL) if self.alternates else (SPATIAL,):
            rows = grid.rows(layout)
            by_kind[layout] = Sequences(
                dtype, head_width, layout, rows.longest_sequence, packed=not rows.are_sequences
            )
        text = Sequences(dtype, head_width, "cross", self.model_max_length, packed=True)
        return by_kind | {"cross": text}

    def _check_width(self) -> None:
        hidden, heads = self.hidden_size, self.num_heads
        # Sines and cosines of a patch's column and row; rotary embedding turns pairs of channels.
        unit = math.lcm(4, 2 * heads if self.rotary else heads)
        if hidden % unit:
            raise ValueError(
                f"got hidden_size {hidden} and num_heads {heads}; expected num_heads to divide "
                f"hidden_size, a multiple of {unit}; change one of the two"
            )

    def _check_positive(self, *names: str) -> None:
        for name in names:
            number = getattr(self, name)
            if not number > 0:
                raise ValueError(f"got {name} {number}; expected a positive number; change it")

    def _check_rates(self, *names: str) -> None:
        for name in names:
            rate = getattr(self, name)
            if not 0 <= rate < 1:
                raise ValueError(f"got {name} {rate}; expected a rate in [0, 1); lower it")

    def _make_tuple(self, name: str) -> None:
        """Sizes are lists in JSON and in configs; as tuples they can be hashed."""
        object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class STDiTConfig(SharedConfig):
    """Constructor arguments of STDiT; see ``SharedConfig`` for most of them.

    ``input_size`` is the only latent size (frames, height, width) that the model takes. Patch
    coordinates are divided by ``space_scale``, frame numbers by ``time_scale``.
    """

    rotary = False

    input_size: tuple[int, int, int] = (1, 32, 32)
    space_scale: float = 1.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("space_scale", "time_scale")

        self._make_tuple("input_size")
        size, patch = self.input_size, self.patch_size
        if len(size) != 3 or min(size) < 1 or any(n % p for n, p in zip(size, patch, strict=True)):
            raise ValueError(
                f"got input_size {size} and patch_size {patch}; expected (frames, height, width) "
                "of latents in whole patches; round input_size, or take STDiT2 or STDiT3, which pad"
            )


@dataclass(frozen=True, kw_only=True)
class STDiT2Config(SharedConfig):
    """Constructor arguments of STDiT2; see ``SharedConfig`` for most of them.

    ``input_sq_size`` is the side of the square, in pixels, that positions are scaled to.
    ``qk_norm_legacy`` rotates queries and keys before their norm, as in Open-Sora 1.1. In 1.2 the
    norm comes first.
    """

    input_sq_size: int = 32
    qk_norm: bool = False
    qk_norm_legacy: bool = False

    @classmethod
    def implied_by(cls, released: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        if not released.get("qk_norm") or "qk_norm_legacy" in released:
            return {}, ""
        reason = "qk_norm without qk_norm_legacy is of Open-Sora 1.1: qk_norm_legacy=True"
        return {"qk_norm_legacy": True}, reason

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("input_sq_size")
        if self.hidden_size % 3:
            raise ValueError(
                f"got hidden_size {self.hidden_size}; expected a multiple of 3 (height, width and "
                "aspect ratio have a third of the channels each); choose another hidden_size"
            )


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(SharedConfig):
    """Constructor arguments of STDiT3; see ``SharedConfig`` for most of them.

    ``input_sq_size`` is the side of the square, in pixels, that positions are scaled to. Open-Sora
    1.3 has ``use_cond``, which embeds conditioning frames; windows of ``kernel_size`` (height,
    width, frames) patches for temporal attention, -1 for all; and with ``use_spatial_rope`` rotary
    positions also in a frame. ``skip_y_embedder``, which the releases' files have, must be False.
    With ``skip_temporal`` there are no temporal blocks: a model of images, whose frames do not
    attend to each other.
    """

    input_sq_size: int = 512
    model_max_length: int = 300
    qk_norm: bool = True
    skip_y_embedder: bool = False
    use_cond: bool = False
    kernel_size: tuple[int, int, int] | None = None
    use_spatial_rope: bool = False
    skip_temporal: bool = False

    @classmethod
    def implied_by(cls, released: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        if "kernel_size" not in released:
            return {}, ""
        version = "kernel_size is of Open-Sora 1.3, which embeds conditioning frames"
        return {"use_cond": True}, f"{version}: use_cond=True"

    @property
    def num_blocks(self) -> int:
        """Spatial and temporal blocks."""
        return self.depth if self.skip_temporal else 2 * self.depth

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("input_sq_size")
        if self.skip_y_embedder:
            raise ValueError(
                "got skip_y_embedder=True, for text that is projected already; expected False; "
                "remove it, and pass the result of encode_text to the model as y"
            )
        if self.kernel_size is not None:
            self._make_tuple("kernel_size")
            self._check_windows(self.kernel_size)
        elif self.use_spatial_rope:
            raise ValueError(
                "got use_spatial_rope without kernel_size; expected both or none; "
                "set kernel_size=(8, 8, -1)"
            )

    def _check_windows(self, kernel: tuple[int, int, int]) -> None:
        is_window = len(kernel) == 3 and all(k == -1 or k >= 1 for k in kernel)
        if not is_window or kernel[2] != -1 or self.full_attention:
            raise ValueError(
                f"got kernel_size {kernel} and full_attention {self.full_attention}; expected "
                "(height, width, -1) in patches, windows through all frames, and no full "
                "attention; write for example (8, 8, -1)"
            )
        if self.hidden_size // self.num_heads % 6:
            raise ValueError(
                f"got hidden_size {self.hidden_size} and num_heads {self.num_heads} with "
                "kernel_size; expected heads whose width is a multiple of 6 (pairs of channels for "
                "frame, line and column); change one of the two"
            )
