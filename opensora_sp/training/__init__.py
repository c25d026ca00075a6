"""The training run."""

from .trainer import train

__all__ = ["train"]
