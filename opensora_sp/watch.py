"""Alias of ``opensora_sp.runtime``, until 1.0."""

from opensora_sp.runtime import (  # noqa: F401
    Watch,
    backend_timeout,
    leave_process_group,
)
