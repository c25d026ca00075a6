"""The sampling run."""

from .prompts import read_prompts
from .run import sample

__all__ = ["read_prompts", "sample"]
