"""Activations of a training or sampling step, traced on meta tensors, which hold no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from opensora_sp.config.sections import Lora
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models.extra_inputs import extra_shapes
from opensora_sp.models.kernels.fused import Kernels, using_kernels
from opensora_sp.models.lora import add_lora, targets_of_any_block
from opensora_sp.models.quantized import quantize_blocks
from opensora_sp.models.registry import model_class
from opensora_sp.parallel import Options, SequenceMesh, parallelize

from .live_peak import CUBLAS_WORKSPACE, AllocatorPeak, LivePeak

DEPTH = 2  # pairs of blocks traced; each further one adds as much as the second


@dataclass(frozen=True)
class Activations:
    """Live bytes at the peak of a pass, without weights and kept gradients, by depth.

    They are ``first + depth * pair``.

    ``inputs`` are the bytes that live during the whole step, the batch and cuBLAS's workspaces,
    which are part of that; ``largest`` is the size of the largest block.
    """

    first: float
    pair: float
    inputs: int
    largest: int = 0

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
    level: int,
    training: bool,
    device: str = "cuda",
    kernels: Kernels = "torch",
    lora: Lora | None = None,
    num_frames: int | None = None,
) -> Activations:
    """Trace the busiest of ``ranks`` at a small depth.

    Args:
        name, config: a model's registered name and its whole configuration.
        latents: ``(B, c, frames, height, width)``.
        level: of gradient checkpointing in all blocks (``models/recompute.py``).
        device: "cuda" counts what torch's allocator would allocate, "cpu" the bytes of tensors.
        kernels: as in ``set_kernels``: "triton" takes all of them, "auto" those that this process
            has verified.
        lora: adapters that are trained alone.
        num_frames: of the video, see ``step_inputs``.
    """
    model = small_meta_model(name, config, DEPTH, dtype, lora)
    model.set_grad_checkpoint([level] * len(model.transformer_blocks))
    mesh = SequenceMesh.imagined(ranks, ranks - 1)
    parallelize(model, mesh, dataclasses.replace(options, verify=False))

    live = AllocatorPeak() if device == "cuda" else LivePeak()
    at_segments: list[int] = []  # live bytes
    model.segment.register_forward_pre_hook(lambda *_: at_segments.append(live.live))
    step = run_step(
        model, latents, ranks=ranks, training=training, device="meta", num_frames=num_frames
    )
    before, inputs = live.live, 0
    live.reset_peak()
    with using_kernels(kernels), live:
        for stop in step:
            inputs = live.live - before if stop == "inputs" else inputs
    peak = live.peak - before

    # Between the last parts of two pairs: all that a forward pass makes once exists before the
    # first.
    pair = at_segments[-1] - at_segments[-1 - len(at_segments) // DEPTH]

    # cuBLAS keeps its workspaces after the pass: they exist in the optimizer step as well.
    workspaces = CUBLAS_WORKSPACE * (1 + training) if device == "cuda" else 0
    return Activations(
        first=peak + workspaces - DEPTH * pair,
        pair=pair,
        inputs=inputs + workspaces,
        largest=live.largest,
    )


def meta_model(name: str, config: Any, dtype: torch.dtype, lora: Lora | None = None) -> Any:
    """A model without data, with the adapters that are trained if there are any."""
    with torch.device("meta"):
        model = model_class(name)(config).to(dtype)
        if lora is not None:
            if lora.quantize is not None:
                quantize_blocks(model)
            add_lora(model, **lora.layer_options)
    return model


def small_meta_model(
    name: str, config: Any, depth: int, dtype: torch.dtype, lora: Lora | None = None
) -> Any:
    """The same with fewer blocks, which have the adapters of any block."""
    small = dataclasses.replace(config, depth=depth)
    if lora is None:
        return meta_model(name, small, dtype)

    with torch.device("meta"):
        targets = targets_of_any_block(model_class(name)(config), lora.targets)
    return meta_model(name, small, dtype, lora.model_copy(update={"targets": targets}))


def run_step(
    model: Any,
    latents: tuple[int, ...],
    *,
    ranks: int,
    training: bool,
    device: str,
    num_frames: int | None = None,
) -> Iterator[str]:
    """One pass of a model as the runs make it, gradients of parameters dropped as they come.

    Yields after "inputs" exist and after the "pass", for measurements of memory.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(training and parameter.requires_grad)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    inputs = step_inputs(model, latents, device, num_frames=num_frames)
    target = torch.zeros(latents, device=device) if training else None
    yield "inputs"

    with nullcontext() if training else torch.no_grad():
        output = model(**inputs, output="shards" if training else "full")
    if target is not None:
        loss = rank_loss(velocity_loss(output, target), global_samples=latents[0], world_size=ranks)
        loss.backward()
    yield "pass"


def step_inputs(
    model: Any, latents: tuple[int, ...], device: str, *, num_frames: int | None = None
) -> dict[str, Any]:
    """The inputs of a run. All captions are the null caption, which is as long as a text can be.

    Args:
        num_frames: of the video, for models with an input of each; by default the latent frames.
    """
    config: Any = model.config
    size = latents[0]
    with torch.device(device):
        inputs: dict[str, Any] = dict(
            x=torch.zeros(latents),
            timestep=torch.zeros(size),
            y=torch.zeros(size, 1, config.model_max_length, config.caption_channels),
        )
        if getattr(config, "drop_path", 0.0):
            inputs["drop_path"] = torch.zeros(2 * config.depth, size, dtype=torch.bool)
        inputs |= {name: torch.zeros(size) for name in model.sample_inputs}
        frames, height, width = latents[2:]
        shapes = extra_shapes(
            model.extra_inputs, config, num_frames or frames, (frames, height, width)
        )
        inputs |= {name: torch.zeros(size, *shape) for name, shape in shapes.items()}

    inputs["drop_caption"] = torch.ones(size, dtype=torch.bool)
    return inputs
