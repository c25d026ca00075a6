"""The base of the STDiT models: what their ``forward`` calls before, between and after the blocks.

Legend: B samples, T frames and S patches per frame (after patching), C hidden width, R local
rows, L tokens of a row (S or T), V patch volume, N packed text tokens, m modulation states of a
sample (1, or 2 with conditioning frames).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from opensora_sp.common.tensors import to_device

from .attention import choose_backends
from .block_cache import BlockCache
from .blocks import ModulatedBlock
from .conditions import Condition, Conditioning, Text
from .hook_points import Gather, Segment, Shard, Switch
from .input_checks import check_text
from .layers import CaptionEmbedder, PatchEmbed3D
from .packing import VideoMask
from .recompute import EVERYTHING, Recompute, levels_of
from .stdit_config import SharedConfig
from .token_layout import SPATIAL, TEMPORAL, PatchGrid, Rows

Model = TypeVar("Model", bound="ConditionedModel")

BlocksRunner = Callable[[Tensor, Rows, Conditioning, Tensor | None], tuple[Tensor, Condition]]
"""``run(x [R, S, C], rows, conditioning, drop_path)``, as ``ConditionedModel.run_blocks``."""


class PassCounts(NamedTuple):
    """Work of one pass of a model in plain torch, in addition to products and attention.

    Attributes:
        activations: ``[tokens, C]`` that elementwise kernels of a pair of blocks read and write.
        operators: of a pair of blocks.
        once: operators of embedders, the final layer and the loss.
    """

    activations: float
    operators: float
    once: float


# Hook points of the model itself, by name; blocks have others.
MODEL_POINTS = {name: name for name in ("shard", "switch", "segment", "gather")}


class ConditionedModel(nn.Module):
    """Base of the STDiT models.

    A subclass builds its embedders, blocks and final layer, in the order of the public checkpoints,
    and ``forward``. Every ``forward`` takes these arguments:

    * ``x``: latents ``[B, C_in, frames, height, width]``; sizes that the patch does not divide are
      padded with zeros at the end.
    * ``timestep``: ``[B]``, 0 (data) to 1000 (noise).
    * ``y``: text features ``[B, 1, L, Cy]``, or the result of ``encode_text``.
    * ``mask``: text tokens in use, bool or integers ``[B, L]`` (tiled if it has fewer rows). Best
      on the CPU, even if x is on a GPU: a mask on the GPU costs a device synchronization to read
      the lengths.
    * ``x_mask``: bool ``[B, frames]``; False marks conditioning frames, which have timestep 0.
      Where a patch has several frames, best on the CPU, like ``mask``.
    * ``video_mask``: bool ``[B, frames, height, width]``, for clips of different sizes in one
      batch: False outside of a clip. Each clip is treated as if it were alone, and the output
      outside is zero. Best on the CPU, like ``mask``.
    * ``drop_caption``: bool ``[B]``; True replaces y by the null caption at its full length. Best
      on the CPU, like ``mask``.
    * ``drop_path``: bool ``[2 * depth, B]`` in order of execution. True skips branches of that
      sample. Kept branches are scaled by ``1 / (1 - rate)`` of that depth.
    * ``block_cache``: in sampling, keeps or reuses the residual of all blocks.
    """

    Config: ClassVar[type[SharedConfig]]
    # The hook points that sequence parallelism attaches to, by name.
    # None under "temporal" is a model without temporal blocks.
    sharding_points: Mapping[str, str | None]
    # Numbers of a sample that ``forward`` takes, ``[B]`` each, by name.
    sample_inputs: ClassVar[tuple[str, ...]] = ()
    # Further tensors of a sample that ``forward`` takes, by name: axes as in ``extra_inputs.py``.
    extra_inputs: ClassVar[Mapping[str, str]] = {}
    # Parts of the model whose layers see all tokens of a clip; of a block's, one sees the text.
    token_parts: ClassVar[tuple[str, ...]] = ("x_embedder", "blocks", "final_layer")
    # Forward and backward, as counted on meta tensors; by default of STDiT3. Schedules depend on
    # them.
    pass_counts = PassCounts(83, 80, 95), PassCounts(297, 170, 95)

    config: SharedConfig
    x_embedder: PatchEmbed3D
    y_embedder: CaptionEmbedder

    def __init__(self, config: SharedConfig) -> None:
        super().__init__()
        self.config = config
        # The setting, of which checkpoint levels are made.
        self.grad_checkpoint: bool | int | str | Sequence[int] = False
        # Runs a part compiled, ``run(part, x, condition, *arguments)``; see compile.py.
        self.run_compiled: Callable[..., Tensor] | None = None
        self.shard, self.switch, self.segment, self.gather = Shard(), Switch(), Segment(), Gather()

    @classmethod
    def from_pretrained(cls: type[Model], path: str | Path, **options: Any) -> Model:
        """Build a model of this class from weights in any layout.

        Options as of ``opensora_sp.checkpoint.from_pretrained``: ``revision`` of a name on the hub,
        ``strict``, ``ema``, ``dtype`` and others, and values of the configuration.
        """
        from opensora_sp.checkpoint import from_pretrained

        return from_pretrained(path, model=cls.__name__, **options)  # type: ignore[return-value]

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write ``config.json``, safetensors and a model card into a new folder.

        Options as of ``opensora_sp.checkpoint.save_pretrained``: ``max_shard_size``, ``license``,
        ``base_model``.
        """
        from opensora_sp.checkpoint import save_pretrained

        save_pretrained(self, path, **options)

    def position_tables(self) -> dict[str, Tensor]:
        """Buffers in the state dict that follow from the configuration, by name."""
        return {}

    def set_grad_checkpoint(self, setting: bool | int | str | Sequence[int] = True) -> None:
        """Choose what forward keeps of each block; backward recomputes the rest.

        Args:
            setting: whether to recompute all blocks; the number of blocks to recompute; "offload"
                to recompute all and keep their inputs on the host; or the level of each block,
                ``OFFLOADED`` or 0 (recompute all) to ``EVERYTHING`` (``recompute.py``).

        Raises:
            ValueError: if the model has fewer blocks, or there is no such level.
        """
        blocks = self.transformer_blocks
        for block, level in zip(blocks, levels_of(setting, len(blocks)), strict=True):
            block.checkpoint_level = level
        self.grad_checkpoint = setting

    @property
    def transformer_blocks(self) -> list[ModulatedBlock]:
        """All blocks, spatial and temporal."""
        return [module for module in self.modules() if isinstance(module, ModulatedBlock)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.x_embedder.proj.weight.dtype

    def encode_text(
        self, y: Tensor, mask: Tensor | None = None, drop_caption: Tensor | None = None
    ) -> Text:
        """Encode captions once, with the keys and values of every block, for many calls.

        A sampler calls the model with the same text at every step. Pass the result as ``y``,
        without ``mask`` and ``drop_caption``. Arguments as of ``forward``.
        """
        check_text(self.config, len(y), y, mask, drop_caption)
        text = self.embed_text(y, mask, drop_caption)
        layers = (block.cross_attn for block in self.transformer_blocks)
        return replace(text, keys_values={layer: layer.kv_linear(text.tokens) for layer in layers})

    def embed_text(self, y: Tensor | Text, mask: Tensor | None, drop: Tensor | None) -> Text:
        """Captions packed and projected, ``[N, C]``; encoded text is returned as it is."""
        if isinstance(y, Text):
            return y
        packed, lengths = self.y_embedder.pack(y, mask, drop)  # [N, Cy]
        return Text(self.y_embedder(packed.to(self.dtype)), lengths)

    def patch_grid(
        self,
        x: Tensor,
        video_mask: Tensor | None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        *,
        trained_at: int = 1,
    ) -> PatchGrid:
        """The patches of latents ``x``, with the attention backends resolved for this forward.

        The scale of positions is the side of a square with the area of the first sample in pixels,
        as released, over ``trained_at``. With a mask each sample has its own; without pixels it
        is 1.
        """
        num_samples = len(x)
        scale = torch.ones(num_samples, device=x.device)
        if height is not None and width is not None:
            scale = ((height.double() * width).sqrt() / trained_at).float().to(x.device)  # [B]

        mask = None
        if video_mask is not None:
            scale = scale.expand(num_samples)
            mask = VideoMask.of(video_mask, self.config.patch_size, x.device)

        # Backends depend on the lengths of the batch, and are resolved before any block.
        config, (frames, lines, columns) = self.config, x.shape[2:]
        grid = config.grid(
            num_samples, (frames, lines, columns), mask=mask, scale=scale if mask else scale[0]
        )
        sequences = config.sequences(grid, self.dtype)
        return replace(grid, attention=choose_backends(config.attention, sequences, x.device))

    def patchify(self, x: Tensor, rows: Rows) -> Tensor:
        """The patches of the local rows, ``[R, L, V * c]``; zero outside of the clips."""
        return rows.clear_outside(rows.slice(x)).to(self.dtype)

    def unpatchify(self, x: Tensor, rows: Rows) -> Tensor:
        """The final layer's rows ``[R, L, V * C_out]`` as latents, in at least float32.

        They are gathered from all ranks, unless the caller asks for shards. Zero outside of the
        clips.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.gather(rows.clear_outside(x), rows)

    def timesteps(self, timestep: Tensor, x_mask: Tensor | None) -> Tensor:
        """Each sample's timestep and, with a mask, the 0 of its conditioning frames: ``[B, m]``."""
        if x_mask is None:
            return timestep[:, None]
        return torch.stack([timestep, torch.zeros_like(timestep)], dim=1)

    def conditioning_frames(self, x_mask: Tensor | None) -> Tensor | None:
        """``[B, frames]``, False for conditioning frames -> ``[B, T]``, True for such patches."""
        if x_mask is None:
            return None
        frames = ~x_mask[:, :: self.config.patch_size[0]].bool()
        return to_device(frames, self.x_embedder.proj.weight.device)

    def branch_scales(self, drop_path: Tensor | None) -> Sequence[Tensor | None]:
        """The factors ``[B]`` of the branches of each part between switches (drop-path)."""
        depth = self.config.depth
        if drop_path is None:
            return [None] * 2 * depth

        # The rate grows linearly over the depth.
        rates = torch.linspace(0, self.config.drop_path, depth, dtype=torch.float64)
        scales = to_device((1 / (1 - rates)).repeat_interleave(2)[:, None], drop_path.device)
        # Every second entry has no part in a model without temporal blocks.
        return (~drop_path * scales).unbind()[:: 1 if self.config.alternates else 2]

    def run_blocks(
        self, x: Tensor, rows: Rows, conditioning: Conditioning, drop_path: Tensor | None
    ) -> tuple[Tensor, Condition]:
        """Run all blocks on the local rows ``[R, L, C]``, as tokens enter.

        Returns tokens ``[R, L, C]`` as they leave the last block, and the condition of their rows.
        """
        raise NotImplementedError

    def blocks_runner(self, cache: BlockCache | None) -> BlocksRunner:
        """``run_blocks``, or a function that keeps or reuses the residual as ``cache`` says."""
        if cache is None or not (cache.keeps or cache.reuses):
            return self.run_blocks
        return partial(self._run_cached, cache)

    def _run_cached(
        self,
        cache: BlockCache,
        x: Tensor,
        rows: Rows,
        conditioning: Conditioning,
        drop_path: Tensor | None,
    ) -> tuple[Tensor, Condition]:
        # The blocks' input in the layout of their output.
        entered, last_rows, layout = x, rows, SPATIAL
        if self.config.alternates:
            entered, last_rows = self.switch(x, rows)
            layout = TEMPORAL

        if cache.reuses:
            assert cache.residual is not None
            return entered + cache.residual, conditioning.of(layout, last_rows)
        x, condition = self.run_blocks(x, rows, conditioning, drop_path)
        cache.residual = x - entered
        return x, condition

    def run_part(
        self,
        part: Callable[..., Tensor],
        x: Tensor,
        condition: Condition,
        *arguments: Tensor | None,
        last: bool = False,
    ) -> Tensor:
        """Run ``part(x, condition, *arguments)`` as a segment, compiled or recomputed if asked for.

        Args:
            part: a block, or the part of one between two switches.
            last: no switch follows.
        """
        block: Any = getattr(part, "__self__", part)
        recompute, condition = self._recompute(block), condition.of_block(block)
        # Compiled inside of the segment: checkpointing recomputes compiled code.
        function, rows = part, condition.rows
        if self.run_compiled is not None:
            function = partial(self.run_compiled, part)
        # With overlap, an ``InFlightSwitch`` until the switch (``parallel/overlap.py``).
        return self.segment(
            function, rows, x, condition, *arguments, recompute=recompute, last=last
        )

    def _recompute(self, block: Any) -> Recompute | None:
        """The recomputation in backward of a block, or of the part of one."""
        level: int = block.checkpoint_level
        if level == EVERYTHING or not torch.is_grad_enabled():
            return None
        if self.run_compiled is not None and level > 0:
            raise ValueError(
                f"got level {level} of gradient checkpointing in compiled blocks; expected 0 or "
                f"{EVERYTHING}, since the others see each operator; set one of these, or compile "
                "nothing"
            )
        width = self.config.hidden_size
        return Recompute(
            level, width, hidden=int(width * self.config.mlp_ratio), preserve_rng=_draws(block)
        )

    def initialize(self, embedders: Iterable[nn.Module], zero: Iterable[str]) -> None:
        """Initialize as the released models: Xavier weights, and small ones in ``embedders``.

        The layers whose names match the patterns ``zero`` begin with zeros.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Flattened: the convolution of patches is a linear layer of each patch.
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))

        for embedder in embedders:
            for linear in embedder.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=0.02)

        for name, module in self.named_modules():
            if any(fnmatchcase(name, pattern) for pattern in zero):
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)


def _draws(block: nn.Module) -> bool:
    """True if a block draws random numbers, as adapters with dropout do."""
    dropouts = (module for module in block.modules() if isinstance(module, nn.Dropout))
    return any(module.training and module.p > 0 for module in dropouts)
