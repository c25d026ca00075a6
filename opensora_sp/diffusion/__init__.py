"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .conditioning_frames import DrawnCondition, draw_condition, draw_frame_mask
from .guidance import ConditioningFrames, predictions_per_step
from .iddpm import IDDPM
from .loss import rank_loss, samples_of_mean, velocity_loss
from .process import DiffusionProcess, Geometry, Noised, OnStep, size_conditions
from .rectified_flow import RectifiedFlow

__all__ = [
    "DiffusionProcess",
    "DrawnCondition",
    "OnStep",
    "Geometry",
    "ConditioningFrames",
    "IDDPM",
    "Noised",
    "RectifiedFlow",
    "draw_condition",
    "draw_frame_mask",
    "predictions_per_step",
    "rank_loss",
    "samples_of_mean",
    "size_conditions",
    "velocity_loss",
]
