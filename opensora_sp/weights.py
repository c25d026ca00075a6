"""Alias of ``opensora_sp.checkpoint``, until 1.0."""

from opensora_sp.checkpoint import *  # noqa: F403
from opensora_sp.checkpoint import __all__ as __all__
