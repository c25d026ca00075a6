"""Alias of ``opensora_sp.checkpoint``, until 1.0."""

import sys

from opensora_sp import checkpoint

sys.modules[__name__] = checkpoint
