"""The training run."""

from .run import train

__all__ = ["train"]
