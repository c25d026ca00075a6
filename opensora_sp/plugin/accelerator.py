"""ColossalAI on CPU: an accelerator whose stream calls do nothing, for gloo."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._colossalai import CpuAccelerator, get_accelerator, set_accelerator


class GlooCpuAccelerator(CpuAccelerator):
    """A CPU accelerator whose stream calls do nothing; ColossalAI's raises, and ZeRO makes them."""

    def _no_stream(self, *args: Any, **kwargs: Any) -> None:
        """A CPU has one stream, which is always current and never ahead of the host."""

    Stream = current_stream = default_stream = set_stream = _no_stream
    synchronize = empty_cache = _no_stream

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def use_cpu_if_nothing_else() -> None:
    """Install the CPU accelerator if ColossalAI found no device and none was chosen."""
    if type(get_accelerator()) is CpuAccelerator:
        set_accelerator(GlooCpuAccelerator())
