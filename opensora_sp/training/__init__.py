"""Training: ``run`` starts and ends a run, ``trainer`` has the loop, the rest is a concern each."""

from .run import train

__all__ = ["train"]
