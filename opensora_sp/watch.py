"""Alias of ``opensora_sp.runtime``, until 1.0."""

import sys

from opensora_sp import runtime

sys.modules[__name__] = runtime
