"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .iddpm import IDDPM
from .loss import rank_loss, velocity_loss
from .rectified_flow import RectifiedFlow

__all__ = ["IDDPM", "RectifiedFlow", "rank_loss", "velocity_loss"]
