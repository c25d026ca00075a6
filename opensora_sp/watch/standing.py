"""Where the threads of this process stand, and which collective they wait in.

Nothing is noted on the way: the stacks are looked at from outside, once in a while, so all collectives are seen (ours,
ZeRO's, those of a checkpoint) and none gets slower.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Waiting:
    """A collective that a thread is in: the ``number``-th of the process group ``group``, by all of ``ranks``.

    ``is_for_one``: it sends to, or receives from, the other one of two ranks.
    """

    operation: str
    tensors: str
    group: str
    number: int
    ranks: tuple[int, ...]
    is_for_one: bool
    place: str

    def __str__(self) -> str:
        return f"{self.operation}({self.tensors}), number {self.number} of process group {self.group}, at {self.place}"


def collectives_waited_for() -> dict[int, Waiting]:
    """By thread: the collective that its innermost call into torch.distributed is."""
    found = {}
    for thread, frame in sys._current_frames().items():
        call = next((f for f in _outwards(frame) if f.f_code.co_filename == c10d.__file__), None)
        if call is not None and isinstance(call.f_locals.get("group") or dist.group.WORLD, dist.ProcessGroup):
            found[thread] = _describe(call)
    return found


def collectives_begun() -> dict[str, int]:
    """How many collectives this rank has begun in each of its process groups (torch has no public way to ask)."""
    return {name: _number(group) for group, name in c10d._world.pg_names.items()}


def stands_at(thread: int) -> str:
    """File, line and function that a thread is in, outside of torch and of the watch."""
    return _place(sys._current_frames().get(thread))


def _describe(call: FrameType) -> Waiting:
    values, code = call.f_locals, call.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    group: Any = values.get("group") or dist.group.WORLD
    other: Any = values.get("dst" if call.f_code.co_name == "send" else "src")
    is_for_one = call.f_code.co_name in ("send", "recv") and other is not None
    return Waiting(
        operation=call.f_code.co_name,
        tensors=", ".join(f"{name} {told}" for name in arguments if (told := _shapes(values.get(name)))),
        group=c10d._world.pg_names[group],
        number=_number(group),
        ranks=(dist.get_rank(), other) if is_for_one else tuple(dist.get_process_group_ranks(group)),
        is_for_one=is_for_one,
        place=_place(call),
    )


def _number(group: Any) -> int:
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:  # of a backend that does not count
        return 0


def _shapes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, torch.Tensor) for one in value):
        return f"{len(value)} x {_shapes(value[0])}"
    return ""


def _place(frame: FrameType | None) -> str:
    for f in _outwards(frame):
        path = Path(f.f_code.co_filename)
        if not str(path).startswith(_PASSED_OVER):
            return f"{'/'.join(path.parts[-3:])}:{f.f_lineno} ({f.f_code.co_name})"
    return "an unknown place"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
