"""A small step of a config's model with and without sequence parallelism, compared on CPU."""

from __future__ import annotations

import math
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from opensora_sp.config import TrainConfig
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.extra_inputs import extra_shapes
from opensora_sp.models.lora import add_lora, targets_of_any_block
from opensora_sp.models.quantized import quantize_blocks
from opensora_sp.parallel import Options, SequenceMesh, parallelize, shutdown_process_group
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import H100
from opensora_sp.parallel.parity import Verdict, verify_step
from opensora_sp.parallel.strategies import Strategy, strategy_for
from opensora_sp.runtime.cost_models import cost_model_of

LatentShape = tuple[int, int, int, int]  # samples, and frames, height and width of their latents


def verify_config(
    cfg: TrainConfig, ranks: int, *, depth: int, max_tokens: int
) -> tuple[LatentShape, type[Strategy], Verdict]:
    """Compare in float64 on ``ranks`` processes, which it starts.

    Args:
        depth: blocks, or pairs of blocks, to keep.
        max_tokens: about as many tokens of a sample are kept.

    Returns:
        The shape of the batch, the parallel strategy it was computed by, and the verdict.

    Raises:
        ValueError: if there are fewer than two ranks to share a batch.
    """
    if ranks < 2:
        raise ValueError(
            f"got sp_size {ranks} to verify; expected at least 2 ranks that share a batch; set "
            "sp_size, or pass --ranks 2"
        )

    results = mp.get_context("spawn").SimpleQueue()
    shape = small_shape(cfg, ranks, max_tokens)
    with TemporaryDirectory() as folder:
        # A file, since a port may be taken meanwhile.
        store = f"file://{folder}/store"
        mp.spawn(_verify_on, (ranks, store, cfg, depth, shape, results), nprocs=ranks)
    return shape, config_strategy(cfg, ranks, shape), results.get()


def _verify_on(
    rank: int,
    ranks: int,
    store: str,
    cfg: TrainConfig,
    depth: int,
    shape: LatentShape,
    results: Any,
) -> None:
    # More threads than cores make each rank slower.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)

    model = small_model(cfg, depth, shape)
    parallelize(model, SequenceMesh(ranks), config_options(cfg), verify=False)
    verdict = verify_step(model, (), small_batch(model, shape, cfg.num_frames))

    if rank == 0:
        results.put(verdict)
    shutdown_process_group()


def small_shape(cfg: TrainConfig, ranks: int, max_tokens: int) -> LatentShape:
    """A batch for which the config's strategy is chosen as well, small.

    Frames are kept, their size is halved until a sample has few tokens. Of the numbers of samples
    from two on, the smallest with the same strategy is taken.
    """
    frames, height, width = planned_latent_size(cfg.vae, cfg.num_frames, *cfg.size)
    patch = cfg.model_spec.config.patch_size
    strategy = config_strategy(cfg, ranks, (cfg.batch_size, frames, height, width))

    while frames * height * width > max_tokens * math.prod(patch) and max(height, width) > 1:
        height, width = -(-height // 2), -(-width // 2)
    height, width = (-(-side // p) * p for side, p in zip((height, width), patch[1:], strict=True))

    for num_samples in range(2, cfg.batch_size):
        shape = num_samples, frames, height, width
        if config_strategy(cfg, ranks, shape) is strategy:
            return shape
    return cfg.batch_size, frames, height, width


def config_strategy(cfg: TrainConfig, ranks: int, shape: LatentShape) -> type[Strategy]:
    """The parallel strategy of a batch of this shape."""
    batch = BatchShape.of(cfg.model_spec.config, shape[0], shape[1:])
    return strategy_for(batch, config_options(cfg), ranks)


def config_options(cfg: TrainConfig) -> Options:
    """The options of a run on GPUs, although this process computes on a CPU."""
    return cfg.parallel_options(cost_model_of(cfg.cost_model, default=H100))


def small_model(cfg: TrainConfig, depth: int, shape: LatentShape) -> nn.Module:
    """The config's model with fewer blocks, in float64.

    No parameter is left zero, which would hide differences. With ``lora``, adapters alone have
    gradients.
    """
    spec = cfg.model_spec
    smaller = spec.with_options(depth=min(depth, spec.config.depth))
    if spec.input_size is not None:
        smaller = smaller.with_options(input_size=shape[1:])

    torch.manual_seed(cfg.seed)
    model = smaller.build().double()
    fill_zero_parameters(model, std=0.02)
    if cfg.lora is not None:
        with torch.device("meta"):
            # The small model may lack blocks that the config names.
            targets = targets_of_any_block(spec.build(), cfg.lora.targets)
        if cfg.lora.quantize is not None:
            # torchao takes no float64; a cast leaves the int8 weights and their scales.
            quantize_blocks(model.float())
            model.double()
        add_lora(model, **{**cfg.lora.layer_options, "targets": targets})
        fill_zero_parameters(model, std=0.02)
    # "auto" may recompute as much.
    model.set_grad_checkpoint(True if cfg.grad_checkpoint == "auto" else cfg.grad_checkpoint)
    return model


@torch.no_grad()
def fill_zero_parameters(model: nn.Module, *, std: float) -> None:
    """Draw parameters that are initialised to zero, which hides errors in all before them."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(std=std)


def small_batch(model: Any, latents: LatentShape, num_frames: int | None = None) -> dict[str, Any]:
    """Inputs drawn for ``forward``.

    Args:
        num_frames: of the video, for models with an input of each; by default as of latents.
    """
    num_samples, frames, height, width = latents
    config, double = model.config, torch.float64
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=double)

    length = min(config.model_max_length, 16)
    # Lengths differ, so that a rank that reads another sample's caption shows.
    text_lengths = torch.arange(length, length - num_samples, -1)
    inputs = dict(
        x=normal(num_samples, config.in_channels, frames, height, width),
        timestep=torch.linspace(900, 100, num_samples, dtype=double),
        y=normal(num_samples, 1, length, config.caption_channels),
        mask=(torch.arange(length) < text_lengths[:, None]).long(),
        x_mask=torch.arange(frames).expand(num_samples, -1) >= config.patch_size[0],
    )

    sides = dict(
        height=8.0 * height, width=8.0 * width, ar=height / width, fps=24.0, num_frames=4.0 * frames
    )
    for name in model.sample_inputs:
        inputs[name] = torch.full((num_samples,), sides[name], dtype=double)
    size = frames, height, width
    shapes = extra_shapes(model.extra_inputs, config, num_frames or frames, size)
    inputs |= {name: normal(num_samples, *shape) for name, shape in shapes.items()}
    return inputs
