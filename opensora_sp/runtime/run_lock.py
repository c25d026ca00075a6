"""One run for each folder: a lock file that names the process which holds it.

The file is made by link(2), which is atomic on NFS as well, and appears with its content. Its time
of modification is the holder's heartbeat. Whether the holder still runs is known at once on its own
host, by process number and start time. On other hosts the heartbeats are watched, so no clocks are
compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from opensora_sp.error_file import write_error_file
from opensora_sp.json_reader import parse_json
from opensora_sp.launchers import is_alive
from opensora_sp.polling import wait_until
from opensora_sp.regular_file import open_regular

from .processes import exiting_after, machine_id

logger = logging.getLogger(__name__)
LOCK = "run.lock"
INTERVAL = 10.0  # seconds from one heartbeat to the next
STALE_AFTER = 120.0  # seconds without one after which the lock of another host is stale
# A run that is ending saves first. Who starts twice by mistake should not wait for long.
LOCAL_WAIT = 30.0  # seconds that a start waits for a live process of this host
LOOK_INTERVAL = 1.0  # seconds from one look at the lock of another run to the next
TAKEN_LOOKS = 2  # in a row that find another holder, after which a run ends
END_TIMEOUT = 10.0  # seconds to report why the process ends
MAX_BYTES = 10_000  # that are read of a lock
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        machine: see ``machine_id``.
        started: see ``start_of``.
        since: when it took the lock, for people.
    """

    host: str
    machine: str
    pid: int
    started: int
    since: str

    @classmethod
    def of_this_process(cls) -> Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        pid = os.getpid()
        return cls(os.uname().nodename, machine_id(), pid, start_of(pid), since)

    @property
    def is_local(self) -> bool:
        return self.machine == machine_id()

    def is_running(self) -> bool:
        """Whether the process runs; of a process on this host."""
        with suppress(psutil.Error):
            return is_alive(psutil.Process(self.pid)) and start_of(self.pid) == self.started
        return False


def start_of(pid: int) -> int:
    """When a process was started, in clock ticks since boot: a time of day moves with the clock.

    In seconds since 1970 where there is no ``/proc``.

    Raises:
        psutil.NoSuchProcess: if it has ended.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])  # field 22, see proc(5)
    return int(psutil.Process(pid).create_time())


@dataclass(frozen=True)
class Found:
    """A lock file as it was read: which file it is, its last heartbeat, and who wrote it."""

    inode: int
    heartbeat: int
    holder: Holder | None  # None if the content is not that of a lock

    @classmethod
    def read(cls, path: Path) -> Found | None:
        """Read a lock; None if there is none."""
        try:
            # Opening a file lets NFS ask for its state, which is cached otherwise.
            with open_regular(path) as file:
                status, text = os.fstat(file.fileno()), file.read(MAX_BYTES)
        except FileNotFoundError:
            return None

        holder = None
        with suppress(ValueError, TypeError):
            holder = Holder(**parse_json(text, str(path)))
        return cls(status.st_ino, status.st_mtime_ns, holder)

    @property
    def name(self) -> str:
        holder = self.holder
        return "another run" if holder is None else f"process {holder.pid} of {holder.host}"

    @property
    def since(self) -> str:
        return "" if self.holder is None else f" since {self.holder.since}"

    @property
    def is_local(self) -> bool:
        return self.holder is not None and self.holder.is_local

    @property
    def has_ended(self) -> bool:
        """Whether it is known that the holder has ended, as it is on its own host."""
        return self.holder is not None and self.holder.is_local and not self.holder.is_running()


class RunLock:
    """Holds a folder for this process: ``with RunLock(folder):``.

    On entry it waits for a run that is just ending. A thread writes the heartbeats, makes a lock
    that was removed again, and ends the process if another run has taken it. Where the folder's
    disk has no hard links, a warning is logged and the folder is not locked.

    Raises:
        ValueError: on entry, if another run still holds the folder after ``LOCAL_WAIT`` (a process
            of this host) or ``STALE_AFTER``, or if the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._holder = Holder.of_this_process()
        self._is_locked = False
        self._released = threading.Event()

    def __enter__(self) -> RunLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not self._link():
                self._await_release()
        except OSError as error:
            raise ValueError(
                f"got outputs {str(self.folder)!r}, in which no file can be made "
                f"({error.strerror or error}); expected a folder to write to; check it, or pass "
                "another --cfg-options outputs=..."
            ) from None

        if self._is_locked:
            threading.Thread(target=self._write_heartbeats, name="run lock", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._released.set()
        # A lock that cannot be removed is stale when this process has ended.
        with suppress(OSError):
            if self._is_held():
                self.path.unlink()

    def _link(self) -> bool:
        """Make the lock file unless there is one; returns whether this process may continue."""
        own = self.folder / f".{LOCK}.{self._holder.host}.{self._holder.pid}"
        try:
            own.write_text(json.dumps(asdict(self._holder)), encoding="utf-8")
            os.link(own, self.path)
            self._is_locked = True
        except FileExistsError:
            # NFS reports this as well where the answer to the first request was lost.
            self._is_locked = own.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            logger.warning("%s is not locked against a second run: %s", self.folder, error)
            return True
        finally:
            own.unlink(missing_ok=True)
        return self._is_locked

    def _await_release(self) -> None:
        """Return where the lock was released, or is stale and removed.

        Raises:
            ValueError: if the process that holds it still runs after the wait.
        """
        found = Found.read(self.path)
        if found is None:
            return
        if found.has_ended:
            return self._remove(found)

        timeout = LOCAL_WAIT if found.is_local else STALE_AFTER
        holder = found.name + found.since
        logger.warning(
            "%s is locked by %s; waiting up to %g s for its end", self.folder, holder, timeout
        )
        if wait_until(lambda: self._is_released_by(found), timeout, LOOK_INTERVAL):
            return

        now = Found.read(self.path)
        if now == found and not found.is_local:
            self._remove(found)
        elif now is not None:
            raise self._refusal(now)

    def _is_released_by(self, found: Found) -> bool:
        now = Found.read(self.path)
        return now is None or now.holder != found.holder or now.has_ended

    def _refusal(self, found: Found) -> ValueError:
        return ValueError(
            f"got outputs {str(self.folder)!r}, which {found.name} holds{found.since}; expected "
            "one run for each folder; wait for that run or end it, or pass another "
            "--cfg-options outputs=..."
        )

    def _remove(self, stale: Found) -> None:
        """Remove a stale lock, unless another start has replaced it by its own meanwhile."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            # On NFS folders have no such lock. There, a run that loses its own is ended.
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            if Found.read(self.path) == stale:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(folder)

    def _is_held(self) -> bool:
        found = Found.read(self.path)
        return found is not None and found.holder == self._holder

    def _write_heartbeats(self) -> None:
        taken = 0
        while taken < TAKEN_LOOKS:
            if self._released.wait(INTERVAL):
                return
            # A disk that does not respond for a while is reported by the next save.
            with suppress(OSError):
                taken = taken + 1 if self._is_taken() else 0
        if not self._released.is_set():
            self._end_process()

    def _is_taken(self) -> bool:
        """Whether another run holds the lock; a heartbeat where none does."""
        found = Found.read(self.path)
        if found is None:
            # A folder that is moved or mounted again is absent for a while.
            if self._link():
                logger.warning("%s was removed; this run has made it again", self.path)
            return False

        if found.holder != self._holder:
            return True
        os.utime(self.path)
        return False

    def _end_process(self) -> NoReturn:
        """Two runs that write to a folder would remove each other's checkpoints."""
        reason = (
            f"got {str(self.path)!r} replaced while the run held it; expected nobody "
            "else to change it; see whether another run writes to the folder"
        )
        with exiting_after(END_TIMEOUT, status=1):
            logger.error("%s", reason)
            write_error_file(reason)
            logging.shutdown()  # flushes
        os._exit(1)
