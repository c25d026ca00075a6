"""Alias of ``opensora_sp.runtime``, until 1.0."""

from opensora_sp.runtime import (  # noqa: F401
    Launch,
    check_machine,
    check_shared_memory,
    meet,
    told_to_all_ranks,
)
