"""Whether a file is still the one that was read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .cache_files import file_checksum


class FileState(NamedTuple):
    """Bytes, time of the last change in ns, and CRC-32 of a file."""

    size: int
    changed_at: int
    checksum: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Of a file as it is now."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, file_checksum(path))

    def is_of(self, path: Path) -> bool:
        """Whether a file has this content; one that cannot be read now counts as unchanged.

        It is read only where its time differs, as that of a copy does.
        """
        try:
            status = path.stat()
            if status.st_size != self.size:
                return False
            return status.st_mtime_ns == self.changed_at or file_checksum(path) == self.checksum
        except OSError:
            return True
