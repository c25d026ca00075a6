"""Alias of ``opensora_sp.runtime``, until 1.0."""

from opensora_sp.runtime import (
    Watch,
    backend_timeout,
    leave_process_group,
)

__all__ = [
    "Watch",
    "backend_timeout",
    "leave_process_group",
]
