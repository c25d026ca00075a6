"""ColossalAI on CPU: an accelerator whose stream calls do nothing, for gloo."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._colossalai import CpuAccelerator, get_accelerator, set_accelerator


class GlooCpuAccelerator(CpuAccelerator):
    """A CPU accelerator whose stream calls do nothing; ColossalAI's raises, and ZeRO makes them."""

    def Stream(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:  # noqa: N802
        return None

    def current_stream(self, device: Any = None) -> None:
        return None

    def default_stream(self, device: Any = None) -> None:
        return None

    def set_stream(self, stream_: Any) -> None:
        return None

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


def use_cpu_if_nothing_else() -> None:
    """Install the CPU accelerator if ColossalAI found no device and none was chosen."""
    if type(get_accelerator()) is CpuAccelerator:
        set_accelerator(GlooCpuAccelerator())
