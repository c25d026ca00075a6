"""Sizes and frame rates of clips, as the diffusion process and the model take them.

Training, validation and sampling all call ``size_conditions``, so the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from opensora_sp.diffusion import DiffusionProcess, Geometry
from opensora_sp.models import sample_numbers


def size_conditions(
    process: DiffusionProcess,
    sample_inputs: Iterable[str],
    shape: tuple[int, int, int],
    fps: Tensor,
    *,
    latent_frames: int,
) -> tuple[Geometry, dict[str, Tensor]]:
    """What a timestep transform and a model take of B clips of one shape.

    Args:
        sample_inputs: the names of the numbers that the model takes,
        ``model_class(...).sample_inputs``.
        shape: frames, height and width of the video.
        fps: frames per second ``[B]``; the results are on its device.
        latent_frames: frames of the latents.

    Returns:
        The geometry for the process's timesteps, and the model's keyword arguments, each ``[B]``.
    """
    num_frames, *sides = shape
    height, width = (torch.full((len(fps),), float(side), device=fps.device) for side in sides)
    geometry = process.geometry(height, width, latent_frames=latent_frames, video_frames=num_frames)
    numbers = sample_numbers(
        sample_inputs, height=height, width=width, fps=fps, num_frames=num_frames
    )
    return geometry, numbers
