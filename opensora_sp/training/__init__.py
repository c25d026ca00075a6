"""The training run: ``trainer`` has the loop; every other module is one concern of it."""

from .trainer import train

__all__ = ["train"]
