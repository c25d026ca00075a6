"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .frame_masks import check_mask_ratios, draw_frame_mask, frame_mask
from .given_frames import DrawnCondition, check_mask_types, draw_condition, given_frames
from .iddpm import IDDPM
from .image_guidance import GivenFrames
from .loss import Positions, rank_loss, samples_of_mean, velocity_loss
from .process import DiffusionProcess, Geometry, Noised, guided, predictions_per_step, unguided
from .rectified_flow import RectifiedFlow

__all__ = [
    "DiffusionProcess",
    "DrawnCondition",
    "Geometry",
    "GivenFrames",
    "IDDPM",
    "Noised",
    "Positions",
    "RectifiedFlow",
    "check_mask_ratios",
    "check_mask_types",
    "draw_condition",
    "draw_frame_mask",
    "frame_mask",
    "given_frames",
    "guided",
    "predictions_per_step",
    "rank_loss",
    "samples_of_mean",
    "unguided",
    "velocity_loss",
]
