"""Activations of a training step or a sampling step, traced: the real model on fake tensors, which hold no data."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.memory import LivePeak
from opensora_sp.models.registry import model_class
from opensora_sp.parallel import Options, SequenceMesh, parallelize

DEPTHS = (2, 3)  # pairs of blocks traced; one more is the same amount more


@dataclass(frozen=True)
class Activations:
    """Live bytes at the peak of a pass, beside weights and kept gradients: ``first + depth * pair``.

    ``inputs`` are the bytes of the batch itself, which are part of that.
    """

    first: float
    pair: float
    inputs: int

    def at(self, depth: float) -> float:
        return self.first + depth * self.pair


def trace_activations(
    name: str,
    config: Any,
    latents: tuple[int, ...],
    *,
    options: Options,
    ranks: int,
    dtype: torch.dtype,
    checkpointing: bool,
    training: bool,
) -> Activations:
    """Trace the busiest of ``ranks`` at small depths.

    Args:
        name, config: a model's registered name and its whole configuration.
        latents: ``(B, c, frames, height, width)``.
    """
    peaks = {}
    for depth in DEPTHS:
        small = dataclasses.replace(config, depth=depth)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _model(name, small, dtype)
            model.set_grad_checkpoint(checkpointing)
            parallelize(model, SequenceMesh.imagined(ranks, ranks - 1), **dataclasses.asdict(options))
            peaks[depth], inputs = _peak(model, latents, ranks, training)
    low, high = DEPTHS
    pair = (peaks[high] - peaks[low]) / (high - low)
    return Activations(first=peaks[low] - low * pair, pair=pair, inputs=inputs)


def _model(name: str, config: Any, dtype: torch.dtype) -> Any:
    model = model_class(name)(config)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(dtype)  # Module.to cannot swap fake parameters in newer torch
    return model


def _peak(model: nn.Module, latents: tuple[int, ...], ranks: int, training: bool) -> tuple[int, int]:
    """Peak bytes of one pass, and those of its inputs. Gradients of parameters are dropped as they come."""
    for parameter in model.parameters():
        parameter.requires_grad_(training and parameter.requires_grad)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with LivePeak() as live, nullcontext() if training else torch.no_grad():
        inputs = _inputs(model, latents)
        target = torch.zeros(latents) if training else None
        of_inputs = live.live
        output = model(**inputs, output="shards" if training else "full")
        if target is not None:
            loss = rank_loss(velocity_loss(output, target), global_samples=latents[0], world_size=ranks)
            loss.backward()
    return live.peak, of_inputs


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _inputs(model: Any, latents: tuple[int, ...]) -> dict[str, Any]:
    """What the runs pass. All captions are the null caption: it has as many tokens as a text can have, and the choice
    needs no look into fake data."""
    config: Any = model.config
    size = latents[0]
    with unset_fake_temporarily():
        drop_caption = torch.ones(size, dtype=torch.bool)
    inputs: dict[str, Any] = dict(
        x=torch.zeros(latents),
        timestep=torch.zeros(size),
        y=torch.zeros(size, 1, config.model_max_length, config.caption_channels),
        drop_caption=drop_caption,
    )
    if getattr(config, "drop_path", 0.0):
        inputs["drop_path"] = torch.zeros(2 * config.depth, size, dtype=torch.bool)
    inputs |= {name: torch.zeros(size) for name in model.sample_inputs}
    return inputs
