"""Confinement of a process before it reads a foreign file: limits, and a filter of system calls.

The filter (seccomp, Linux 3.5) needs no privileges, and neither it nor the limits can be undone. It
allows to read and write descriptors that are open already, to allocate memory, and to exit. All
other system calls fail with EPERM: opening, changing or deleting files, sockets, starting programs,
signals to other processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys

# From <linux/prctl.h> and <linux/seccomp.h>.
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
KILL_PROCESS, FAIL, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Offsets in struct seccomp_data.
SYSTEM_CALL, ARCHITECTURE = 0, 4
# Instructions of classic BPF, from <linux/bpf_common.h>.
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06

# Names for the reader: the filter compares numbers, which differ between processors.
ALLOWED = (
    "read", "write", "lseek", "brk", "mmap", "munmap", "mremap", "madvise", "futex",
    "rt_sigreturn", "exit", "exit_group",
)  # fmt: skip
# The architecture's number in the filter, and the numbers of ALLOWED.
NUMBERS = {
    "x86_64": (0xC000003E, (0, 1, 8, 12, 9, 11, 25, 28, 202, 15, 60, 231)),
    "aarch64": (0xC00000B7, (63, 64, 62, 214, 222, 215, 216, 233, 98, 139, 93, 94)),
}


def confine(*, memory: int, seconds: int) -> None:
    """Confine this process, until it ends, to descriptors that are open and to its own memory.

    Args:
        memory: limit of its address space, in bytes.
        seconds: limit of its CPU time.

    Raises:
        OSError, ValueError: if this machine has no such filter, or refuses the limits.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {sys.platform}, {machine}")

    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_CORE: 0,
        # No new descriptor of any kind. It repeats the filter, in another part of the kernel.
        resource.RLIMIT_NOFILE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        # A batch system or `ulimit` may have set a lower one, which cannot be raised.
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))

    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _filter_system_calls(_program(*NUMBERS[machine]))


def _filter_system_calls(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of 8 bytes, and their address.
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def _program(architecture: int, numbers: tuple[int, ...]) -> bytes:
    """The filter: end the process on another architecture, and allow the calls of ``numbers``."""
    instructions = [
        (LOAD_WORD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD_WORD, 0, 0, SYSTEM_CALL),
    ]
    for position, number in enumerate(numbers):
        # Where equal, over the other comparisons and FAIL.
        instructions.append((JUMP_IF_EQUAL, len(numbers) - position, 0, number))

    instructions += [(RETURN, 0, 0, FAIL | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def _prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Unused arguments must be zero, and all are as wide as a pointer.
    padded = [*arguments, *[0] * (5 - len(arguments))]
    as_words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in padded]
    if libc.prctl(*as_words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
