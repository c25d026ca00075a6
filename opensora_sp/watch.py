"""Alias of ``opensora_sp.runtime``, until 1.0."""

from opensora_sp.runtime import *  # noqa: F403
from opensora_sp.runtime import __all__ as __all__
