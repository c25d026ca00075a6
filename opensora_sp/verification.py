"""Compare one small step of a config's model with and without sequence parallelism, on CPU."""

from __future__ import annotations

import math
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from .config import TrainConfig
from .encoders import planned_latent_size
from .parallel import (
    Options,
    SequenceMesh,
    Verdict,
    parallelize,
    shutdown_process_group,
    verify_step,
)
from .parallel.strategies import choose_mode

Shape = tuple[int, int, int, int]  # samples, and frames, height and width of their latents


def verify_config(
    cfg: TrainConfig, ranks: int, *, depth: int, max_tokens: int
) -> tuple[Shape, str, Verdict]:
    """Compare in float64 on ``ranks`` processes, with a smaller model and batch.

    Args:
        depth: number of blocks, or pairs of blocks.
        max_tokens: tokens of a sample, about.

    Returns:
        The shape of the batch, the name of the parallel strategy, and the verdict.

    Raises:
        ValueError: for fewer than two ranks.
    """
    if ranks < 2:
        raise ValueError(
            f"got {ranks} rank to share a batch; expected at least 2; set sp_size, or pass --ranks "
            "2"
        )

    results = mp.get_context("spawn").SimpleQueue()
    with TemporaryDirectory() as folder:
        args = (ranks, f"file://{folder}/store", cfg, depth, max_tokens, results)
        mp.spawn(_verify_on, args, nprocs=ranks)
    return results.get()


def _verify_on(
    rank: int, ranks: int, store: str, cfg: TrainConfig, depth: int, max_tokens: int, results: Any
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)

    mesh, shape = SequenceMesh(ranks), small_shape(cfg, ranks, max_tokens)
    model = small_model(cfg, depth, shape)
    parallelize(model, mesh, **{**dict(cfg.sequence_parallel), "verify": False})
    verdict = verify_step(model, (), small_batch(model, shape))
    if rank == 0:
        results.put((shape, strategy_of(cfg, ranks, shape), verdict))
    shutdown_process_group()


def small_shape(cfg: TrainConfig, ranks: int, max_tokens: int) -> Shape:
    """A small batch that the ranks share by the same strategy as the config's batch.

    The number of frames stays. Height and width are halved until a sample has ``max_tokens``. The
    number of samples is the smallest, from two on, with the same strategy.
    """
    frames, height, width = planned_latent_size(cfg.vae, cfg.num_frames, *cfg.size)
    patch = cfg.model_spec.config.patch_size
    strategy = strategy_of(cfg, ranks, (cfg.batch_size, frames, height, width))

    while frames * height * width > max_tokens * math.prod(patch) and max(height, width) > 1:
        height, width = (-(-side // 2) for side in (height, width))
    height, width = (-(-side // p) * p for side, p in zip((height, width), patch[1:], strict=True))

    for num_samples in range(2, cfg.batch_size):
        shape = (num_samples, frames, height, width)
        if strategy_of(cfg, ranks, shape) == strategy:
            return shape
    return (cfg.batch_size, frames, height, width)


def strategy_of(cfg: TrainConfig, ranks: int, shape: Shape) -> str:
    """The name of the parallel strategy for a batch of this shape."""
    config = cfg.model_spec.config
    grid = config.grid(shape[0], shape[1:])
    options = Options(**cfg.sequence_parallel.model_dump(exclude={"verify"}))
    return choose_mode(options, grid, config.hidden_size, config.num_heads, ranks).__name__


def small_model(cfg: TrainConfig, depth: int, shape: Shape) -> nn.Module:
    """The config's model with fewer blocks, in float64.

    Parameters that are initialised to zero are drawn at random: zeros would hide differences.
    """
    spec = cfg.model_spec
    smaller = spec.with_options(depth=min(depth, spec.config.depth))
    if spec.input_size is not None:
        smaller = smaller.with_options(input_size=shape[1:])

    torch.manual_seed(cfg.seed)
    model = smaller.build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    model.set_grad_checkpoint(cfg.grad_checkpoint)
    return model


def small_batch(model: Any, shape: Shape) -> dict[str, Any]:
    """Random inputs of ``forward``."""
    num_samples, frames, height, width = shape
    config, double = model.config, torch.float64
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=double)

    length = min(config.model_max_length, 16)
    text_lengths = torch.arange(length, length - num_samples, -1)
    inputs = dict(
        x=normal(num_samples, config.in_channels, frames, height, width),
        timestep=torch.linspace(900, 100, num_samples, dtype=double),
        y=normal(num_samples, 1, length, config.caption_channels),
        mask=(torch.arange(length) < text_lengths[:, None]).long(),
        x_mask=torch.arange(frames).expand(num_samples, -1) >= config.patch_size[0],
    )

    numbers = dict(
        height=8.0 * height, width=8.0 * width, ar=height / width, fps=24.0, num_frames=4.0 * frames
    )
    for name in model.sample_inputs:
        inputs[name] = torch.full((num_samples,), numbers[name], dtype=double)
    return inputs
