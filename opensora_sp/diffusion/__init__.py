"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .frame_masks import check_mask_ratios, draw_frame_mask, frame_mask
from .iddpm import IDDPM
from .loss import Positions, rank_loss, samples_of_mean, velocity_loss
from .process import DiffusionProcess, Geometry, Noised, guided, unguided
from .rectified_flow import RectifiedFlow

__all__ = [
    "DiffusionProcess",
    "Geometry",
    "IDDPM",
    "Noised",
    "Positions",
    "RectifiedFlow",
    "check_mask_ratios",
    "draw_frame_mask",
    "frame_mask",
    "guided",
    "rank_loss",
    "samples_of_mean",
    "unguided",
    "velocity_loss",
]
