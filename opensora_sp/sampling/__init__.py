"""The sampling run."""

from .command import parse
from .prompts import read_prompts
from .run import sample

__all__ = ["parse", "read_prompts", "sample"]
