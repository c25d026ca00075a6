"""What runs in the process under the stub: phases, the source lines of syncs, the call itself."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from cuda_stub.recording import Memory

SourceFunction = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int)


class Session:
    """One recorded call in this process."""

    current: Session | None = None

    def __init__(self, record: Path, library: Path, test_file: str) -> None:
        self.library = ctypes.CDLL(str(library))
        self.test_file = test_file
        self.memory: list[Memory] = []
        self.collectives: list[Any] = []  # of `collectives.py`
        self.phase = ""
        self._before = 0

        # The library calls it for as long as the process lives, so the reference must stay.
        self._source = SourceFunction(self._write_source)
        self.library.stub_set_source(self._source)
        self.library.stub_open(str(record).encode())
        Session.current = self
        _show_no_values()

    def enter(self, phase: str) -> None:
        """Close the memory account of the phase that ends, and name those that follow."""
        self._close_phase()
        self.phase = phase
        self.library.stub_set_phase(phase.encode())

    def close(self) -> list[Memory]:
        """End the recording; what the allocator did in each phase."""
        self._close_phase()
        self.library.stub_set_source(None)
        self.library.stub_open(b"")
        return self.memory

    def _close_phase(self) -> None:
        import torch

        if not torch.cuda.is_initialized():
            return
        stats = torch.cuda.memory_stats()
        after = stats.get("allocated_bytes.all.current", 0)
        allocated = stats.get("allocated_bytes.all.peak", 0)
        reserved = stats.get("reserved_bytes.all.peak", 0)
        self.memory.append(Memory(self.phase, self._before, after, allocated, reserved))
        self._before = after
        torch.cuda.reset_peak_memory_stats()

    def stream(self) -> int:
        """The current stream's number in the record."""
        import torch

        if not torch.cuda.is_initialized():
            return 0
        handle = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        return int(self.library.stub_stream_id(handle))

    def _write_source(self, buffer: Any, size: int) -> None:
        text = self.source_line().encode()[: size - 1]
        ctypes.memmove(buffer, text + b"\0", len(text) + 1)

    def source_line(self) -> str:
        """`file:line` of the innermost frame of the project, ColossalAI or the test."""
        found = self._search(sys._getframe())
        if found is None:
            # Backward runs in threads of autograd, for the frame that waits in the main thread.
            found = self._search(sys._current_frames().get(threading.main_thread().ident or 0))
        return found or ""

    def _search(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            file = frame.f_code.co_filename
            for package in ("opensora_sp", "colossalai"):
                _, separator, after = file.rpartition(f"/{package}/")
                if separator:
                    return f"{package}/{after}:{frame.f_lineno}"
            if file == self.test_file:
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return None


def _show_no_values() -> None:
    """Tensors on the device show their shapes alone.

    Formatting their values would select elements by conditions that were never computed.
    """
    import torch

    original = torch.Tensor.__repr__

    def describe(tensor: torch.Tensor, **options: Any) -> str:
        if tensor.is_cuda:
            return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)})"
        return original(tensor, **options)

    torch.Tensor.__repr__ = describe  # type: ignore[method-assign]


class phase:  # noqa: N801 (reads as a statement)
    """Name what follows: `phase("forward")`, or `with phase("forward"):` to end it as well.

    Each phase has its own peaks of the caching allocator. Outside of the stub it does nothing.
    """

    def __init__(self, name: str) -> None:
        self.former = Session.current.phase if Session.current else ""
        if Session.current:
            Session.current.enter(name)

    def __enter__(self) -> phase:
        return self

    def __exit__(self, *error: object) -> None:
        if Session.current:
            Session.current.enter(self.former)
