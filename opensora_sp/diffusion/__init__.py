"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .conditioning_frames import (
    DrawnCondition,
    check_mask_types,
    conditioning_frames,
    draw_condition,
)
from .frame_masks import check_mask_ratios, draw_frame_mask, frame_mask
from .iddpm import IDDPM
from .image_guidance import ConditioningFrames
from .loss import Positions, rank_loss, samples_of_mean, velocity_loss
from .process import (
    DiffusionProcess,
    EditStep,
    Geometry,
    Noised,
    guided,
    predictions_per_step,
    unguided,
)
from .rectified_flow import RectifiedFlow

__all__ = [
    "DiffusionProcess",
    "DrawnCondition",
    "EditStep",
    "Geometry",
    "ConditioningFrames",
    "IDDPM",
    "Noised",
    "Positions",
    "RectifiedFlow",
    "check_mask_ratios",
    "check_mask_types",
    "draw_condition",
    "draw_frame_mask",
    "frame_mask",
    "conditioning_frames",
    "guided",
    "predictions_per_step",
    "rank_loss",
    "samples_of_mean",
    "unguided",
    "velocity_loss",
]
