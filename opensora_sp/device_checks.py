"""Alias of ``opensora_sp.runtime.doctor.device``, until 1.0."""

from opensora_sp.runtime.doctor.device import (  # noqa: F401
    CHECKS,
    Examination,
    Finding,
    Setup,
    examine_device,
    setup_for,
)
