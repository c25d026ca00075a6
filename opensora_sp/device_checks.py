"""Alias of ``opensora_sp.runtime.doctor.device``, until 1.0."""

from opensora_sp.runtime.doctor.device import *  # noqa: F403
from opensora_sp.runtime.doctor.device import __all__ as __all__
