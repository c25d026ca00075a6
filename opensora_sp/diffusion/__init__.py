"""Diffusion processes: what the model is trained to predict, and how samples are drawn from it."""

from .loss import rank_loss, velocity_loss
from .rectified_flow import Geometry, RectifiedFlow, guided

__all__ = ["Geometry", "RectifiedFlow", "guided", "rank_loss", "velocity_loss"]
