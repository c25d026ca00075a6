"""What the stub recorded, as data: one dataclass for each kind of line that the C side writes."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """What every record has."""

    phase: str
    stream: int


@dataclass(frozen=True)
class Launch(Record):
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    name: str  # demangled


@dataclass(frozen=True)
class Gemm(Record):
    """A product of cuBLAS."""

    call: str
    dtype: str  # of the operands
    reduced_precision: bool  # partial sums may be added in the result's 16 bits
    epilogue: int  # cublasLtEpilogue_t; 1 is none


@dataclass(frozen=True)
class Copy(Record):
    kind: str  # H2D, D2H, D2D, H2H
    bytes: int
    asynchronous: bool
    pinned: bool  # no pageable host memory takes part
    where: str

    @property
    def blocking(self) -> bool:
        """Whether the host waits: copies to pageable memory block, whatever is asked."""
        return not self.asynchronous or (self.kind == "D2H" and not self.pinned)


@dataclass(frozen=True)
class Memset(Record):
    bytes: int


@dataclass(frozen=True)
class Sync(Record):
    kind: str  # stream, device, event
    where: str


@dataclass(frozen=True)
class Event(Record):
    kind: str  # record, wait
    event: int


@dataclass(frozen=True)
class Allocation(Record):
    kind: str  # malloc, free, oom, pinned
    bytes: int
    in_use: int  # of device memory, after it


@dataclass(frozen=True)
class Memory:
    """The caching allocator over one phase, in bytes."""

    phase: str
    before: int  # allocated when it began
    after: int
    allocated: int  # peaks
    reserved: int


@dataclass
class Recording:
    result: Any = None
    launches: list[Launch] = field(default_factory=list)
    refused: list[Launch] = field(default_factory=list)  # outside of the device's limits
    gemms: list[Gemm] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    memsets: list[Memset] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)  # one for each phase, in order
    collectives: list[Any] = field(default_factory=list)  # `Collective`s, after `join`
    unknown: list[str] = field(default_factory=list)  # calls that the stub does not implement
    output: str = ""  # stdout and stderr

    @property
    def streams(self) -> set[int]:
        """Streams that work was put on; 0 is the default stream."""
        work = (*self.launches, *self.gemms, *self.copies, *self.memsets)
        return {record.stream for record in work}

    def peak(self, phase: str) -> Memory:
        """The phase's memory; of several phases of this name, the one with the highest peak."""
        return max((m for m in self.memory if m.phase == phase), key=lambda m: m.allocated)

    def in_phase(self, phase: str) -> Recording:
        """The records of one phase."""
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list)}
        kept = {}
        for name, values in lists.items():
            kept[name] = [value for value in values if getattr(value, "phase", phase) == phase]
        return Recording(self.result, **kept, output=self.output)

    def kernels(self) -> Counter[str]:
        """How often each kernel was launched, by the name in front of its template arguments."""
        return Counter(base_name(launch.name) for launch in self.launches)


def base_name(kernel: str) -> str:
    """`void at::native::reduce_kernel<512, ...>(...)` -> `at::native::reduce_kernel`."""
    name = kernel.replace("(anonymous namespace)", "{anonymous}")
    name = name.split("<")[0].split("(")[0]
    return name.split(" ")[-1]


def read(file: Path) -> Recording:
    recording = Recording()
    # A process that crashed may have left half a line at the end.
    for line in file.read_text(errors="replace").split("\n")[:-1]:
        kind, phase, stream, *columns = line.split("\t")
        _add(recording, kind, (phase, int(stream)), columns)
    return recording


def _add(recording: Recording, kind: str, common: tuple[str, int], columns: list[str]) -> None:
    """One line of the record, whose columns the C side writes in this order."""
    match kind, columns:
        case (("launch" | "refused"), [*numbers, name]):
            x, y, z, bx, by, bz, shared = map(int, numbers)
            launch = Launch(*common, (x, y, z), (bx, by, bz), shared, demangle(name))
            (recording.launches if kind == "launch" else recording.refused).append(launch)
        case "gemm", [call, dtype, reduced, epilogue]:
            gemm = Gemm(*common, call, dtype, reduced == "1", int(epilogue))
            recording.gemms.append(gemm)
        case "copy", [direction, size, call, pinned, where]:
            copy = Copy(*common, direction, int(size), call == "async", pinned == "1", where)
            recording.copies.append(copy)
        case "memset", [size, _]:
            recording.memsets.append(Memset(*common, int(size)))
        case "sync", _:
            recording.syncs.append(Sync(*common, *columns))
        case "event", [action, event]:
            recording.events.append(Event(*common, action, int(event)))
        case (("malloc" | "free" | "oom" | "pinned"), [size, in_use]):
            recording.allocations.append(Allocation(*common, kind, int(size), int(in_use)))
        case "unknown", [name, where]:
            recording.unknown.append(f"{name} at {where or '(no Python frame)'}")


@functools.cache
def demangle(name: str) -> str:
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    address = library.__cxa_demangle(name.encode(), None, None, None)
    # NULL for names that are not mangled: Triton's, or of C functions.
    return name if address is None else ctypes.string_at(address).decode()
