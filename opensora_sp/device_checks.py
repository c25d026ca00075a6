"""Alias of ``opensora_sp.runtime.doctor.device``, until 1.0."""

import sys

from opensora_sp.runtime.doctor import device

sys.modules[__name__] = device
