"""One run for each folder: rank 0 holds an ``flock`` on a file there, which names the process.

The kernel releases the lock when its process ends, whatever it dies of. Some network file systems
keep ``flock`` within one host. There the file's time of modification counts, the holder's
heartbeat; it is watched for a while, so no clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from opensora_sp.common.error_file import wait_until
from opensora_sp.common.files import open_regular, parse_json

from .processes import machine_id

logger = logging.getLogger(__name__)
LOCK = "run.lock"
INTERVAL = 10.0  # seconds from one heartbeat to the next
STALE_AFTER = 120.0  # seconds without one after which the lock of another host is stale
# A run that is ending saves first. Who starts twice by mistake should not wait for long.
LOCAL_WAIT = 30.0  # seconds that a start waits for a live process of this host
LOOK_INTERVAL = 1.0  # seconds from one look at the lock of another run to the next
MAX_BYTES = 10_000  # that are read of a lock
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, on its machine (see ``machine_id``); ``since`` for people."""

    host: str
    machine: str
    pid: int
    since: str

    @classmethod
    def of_this_process(cls) -> Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(os.uname().nodename, machine_id(), os.getpid(), since)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Read a lock file; None if there is none, or its content is none of a lock."""
        # Opening a file lets NFS ask for its state, which is cached otherwise.
        with suppress(ValueError, TypeError, FileNotFoundError), open_regular(path) as file:
            return cls(**parse_json(file.read(MAX_BYTES), str(path)))
        return None

    @property
    def is_local(self) -> bool:
        return self.machine == machine_id()

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host} since {self.since}"


class RunLock:
    """Holds a folder for this process: ``with RunLock(folder):``.

    On entry it waits for a run that is just ending. A thread writes the heartbeats, and ends the
    process if another run has taken the lock. Where the folder's file system has no locks, a
    warning is logged and the folder is not locked.

    Args:
        patience: most seconds to wait, for other ranks that wait for this one meanwhile.

    Raises:
        ValueError: on entry, if another run still holds the folder after ``LOCAL_WAIT`` (a process
            of this host) or ``STALE_AFTER``, or if the folder cannot be written to.
    """

    def __init__(self, folder: Path, patience: float = math.inf) -> None:
        self.folder, self.path, self.patience = folder, folder / LOCK, patience
        self._holder = Holder.of_this_process()
        # The lock lasts as long as this descriptor is open.
        self._descriptor: int | None = None
        self._released = threading.Event()

    def __enter__(self) -> RunLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._lock():
                self._await_release()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ValueError(
                    f"got outputs {str(self.folder)!r}, in which no file can be made "
                    f"({error.strerror or error}); expected a folder to write to; check it, or "
                    "pass another --cfg-options outputs=..."
                ) from None
            logger.warning("%s is not locked against a second run: %s", self.folder, error)
            return self

        threading.Thread(target=self._write_heartbeats, name="run lock", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._released.set()
        if self._descriptor is None:
            return
        # The kernel releases a lock that cannot be removed when this process ends.
        with suppress(OSError):
            # Another run may have taken a lock that looked stale, and has its own file here.
            if Holder.read(self.path) == self._holder:
                self.path.unlink()
        # Workers that were forked meanwhile share the lock, which ends for them too.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _lock(self, *, is_stale: bool = False) -> bool:
        """Take the lock if it is free; returns True if this process holds it.

        Args:
            is_stale: the process of another host that the file names has ended.
        """
        # Whoever can write to the folder could put a link or a named pipe in place of the lock.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder removes the file that it has locked.
            if os.fstat(descriptor).st_ino != self.path.stat().st_ino:
                raise BlockingIOError
            holder = Holder.read(self.path)
            if not (is_stale or holder is None or holder.is_local):
                raise BlockingIOError
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._holder)).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, (BlockingIOError, FileNotFoundError)):
                return False
            raise

        self._descriptor = descriptor
        return True

    def _await_release(self) -> None:
        """Return once this process has the lock.

        Raises:
            ValueError: if another one still holds it after the wait.
        """
        before = self._look()
        holder = before[0]
        needed = LOCAL_WAIT if holder is None or holder.is_local else STALE_AFTER
        timeout = min(needed, self.patience)
        logger.warning(
            "%s is locked by %s; waiting up to %g s for its end",
            self.folder,
            holder or "another run",
            timeout,
        )
        if wait_until(self._lock, timeout, LOOK_INTERVAL):
            return
        # Heartbeats that were watched for less time prove nothing.
        if timeout == needed and self._look() == before and self._lock(is_stale=True):
            return
        raise ValueError(
            f"got outputs {str(self.folder)!r}, which {self._look()[0] or holder or 'another run'} "
            "holds; expected one run for each folder; wait for that run or end it, or pass another "
            "--cfg-options outputs=..."
        )

    def _look(self) -> tuple[Holder | None, int]:
        """Who holds the lock, and its last heartbeat."""
        with suppress(FileNotFoundError):
            return Holder.read(self.path), self.path.stat().st_mtime_ns
        return None, 0

    def _write_heartbeats(self) -> None:
        while not self._released.wait(INTERVAL):
            # A disk that does not respond for a while is reported by the next save. A folder that
            # is moved or mounted again is absent for a while.
            with suppress(OSError):
                holder = Holder.read(self.path)
                if holder == self._holder:
                    # The file's time is the heartbeat, which file servers pass on where they do not
                    # pass locks on.
                    os.utime(self.path)
                elif holder is not None and not self._released.is_set():
                    # Two runs that write to a folder would remove each other's checkpoints.
                    logger.error(
                        "got %s replaced while the run held it; expected nobody else to change "
                        "it; see whether another run writes to the folder",
                        self.path,
                    )
                    os._exit(1)
