"""Pickled weights without unpickling them here: a confined process reads names and shapes.

A pickle can run code as it is read, and so can a TorchScript archive of the same name. With
``weights_only=True``, ``torch.load`` executed code until torch 2.6 (CVE-2025-32434) and wrote
outside of its memory until 2.10 (CVE-2026-24747). So torch never reads such a file. The process of
``opensora_sp.unpickler`` lists where in the file each tensor is, and this one maps these bytes. The
list is not trusted either: each entry must lie within the file.
"""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opensora_sp
from opensora_sp.common.files import parse_json
from opensora_sp.unpickler.archive import FILE

from .tensor_file import DTYPES

MAX_SECONDS, MAX_ANSWER, MAX_MESSAGE = 120, 32 << 20, 1000
# Bytes of tensors per byte of the file: tied weights are listed under each of their names, and many
# names of the same bytes would let a small file fill a disk.
MAX_ALIASES = 8
# Of torch's tensors.
MAX_DIMS = 64
# Python itself may need it to start.
VARIABLES = ("LD_LIBRARY_PATH",)
CHILD = (
    "import sys; sys.path.append(sys.argv[1]); from opensora_sp.unpickler.child import main; main()"
)
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file.

    Args:
        file: bytes of the whole file, mapped.
        start: its first byte.
        stride: in elements.
    """

    file: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def read(self) -> Tensor:
        """A view of the mapped file; a copy where the file does not align it."""
        data = self.file[self.start : self.start + self.num_bytes]
        if self.start % self.dtype.itemsize:
            data = data.clone()
        return data.view(self.dtype).as_strided(self.shape, self.stride)

    @property
    def num_bytes(self) -> int:
        """Length of the bytes from the first element to the last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def open_pickle(file: Path, *, ema: bool) -> tuple[dict[str, MappedTensor], tuple[str, ...]]:
    """The tensors of the state dict in a file of ``torch.save``, and notes on where it was.

    Args:
        ema: prefer the EMA weights of a file that holds both.

    Raises:
        ValueError: if the file is damaged, holds anything but a state dict, takes too much memory
            or time to list, cannot be mapped, or this machine cannot confine a process.
    """
    answer = _ask_child(file, ema=ema)
    if "refused" in answer:
        raise ValueError(_printable(answer["refused"]).replace(FILE, str(file)))
    if "not confined" in answer:
        raise ValueError(
            f"got {file}, which is pickled, on a machine that cannot confine the process that "
            f"reads it ({_printable(answer['not confined'])}); expected Linux on x86_64 or "
            "aarch64; run opensora-sp convert there"
        )

    mapped = _map(file)
    try:
        tensors = {name: _tensor(mapped, row) for name, row in answer["tensors"].items()}
        notes = tuple(map(_printable, answer["notes"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"got {file}, which lists tensors that are not in it ({_printable(error)}); expected "
            "weights saved by torch; copy or download it again"
        ) from None

    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if total > MAX_ALIASES * len(mapped):
        raise ValueError(
            f"got {file} of {len(mapped)} bytes, which lists {len(tensors)} tensors of {total} "
            f"bytes; expected weights tied at most {MAX_ALIASES} times on average; do not use this "
            "file"
        )
    return tensors, notes


def _map(file: Path) -> Tensor:
    """The bytes of a file, mapped to be read only: the kernel reserves no memory for copies.

    Raises:
        ValueError: if it cannot be mapped.
    """
    try:
        with file.open("rb") as opened, warnings.catch_warnings():
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            # Of writing to such a tensor, which would end the process. Readers copy.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(mapped, dtype=torch.uint8)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"got {file}, which cannot be mapped into memory ({error}); expected a file on storage "
            "that allows it, and address space for all of it; copy it to a local disk, or raise "
            "`ulimit -v`"
        ) from None


def _printable(text: Any) -> str:
    """A text of the process, for the log: short, and without codes that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:MAX_MESSAGE])


def _tensor(file: Tensor, row: dict[str, Any]) -> MappedTensor:
    """A row of the answer, checked.

    Raises:
        KeyError, TypeError, ValueError: if it is not as expected, or not within the file.
    """
    shape, stride, start = tuple(row["shape"]), tuple(row["stride"]), row["start"]
    numbers = (start, *shape, *stride)
    are_sound = all(type(number) is int and 0 <= number <= len(file) for number in numbers)
    if not are_sound or len(shape) != len(stride) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape {shape}, stride {stride}, start {start}")

    tensor = MappedTensor(file, BY_NAME[row["dtype"]], shape, stride, start)
    if start + tensor.num_bytes > len(file):
        raise ValueError(f"bytes up to {start + tensor.num_bytes} of {len(file)}")
    return tensor


def _ask_child(file: Path, *, ema: bool) -> dict[str, Any]:
    """What the confined process answers. It has no descriptor but the file.

    Raises:
        ValueError: if it ends without an answer, or takes too long.
    """
    root = Path(opensora_sp.__file__).parents[1]
    # -I and -S: no variables, no folder of the user, no site-packages, no .pth files.
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(root), "ema" if ema else "model"]
    with (
        file.open("rb") as opened,
        subprocess.Popen(
            command,
            stdin=opened,
            stdout=subprocess.PIPE,
            # Read at its end: a process that fills it waits there, and runs out of time.
            stderr=subprocess.PIPE,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name in VARIABLES},
        ) as child,
    ):
        assert child.stdout is not None and child.stderr is not None
        timer = threading.Timer(MAX_SECONDS, child.kill)
        timer.start()
        try:
            data = child.stdout.read(MAX_ANSWER)
        finally:
            timer.cancel()
            child.kill()
        complaint = child.stderr.read()

    try:
        answer = dict(parse_json(data, "the answer"))
    except (ValueError, TypeError):
        status = f"exit status {child.returncode}"
        lines = complaint.decode(errors="replace").strip().splitlines()
        if child.returncode and lines:
            status += f": {_printable(lines[-1])}"
        raise ValueError(
            f"got {file}, whose reader ended without an answer ({status}); "
            f"expected a table of tensors within {MAX_SECONDS} s; do not use this file"
        ) from None
    return answer
