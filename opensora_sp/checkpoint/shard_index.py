"""``<name>.index.json`` in the Hugging Face layout: which of several files holds each tensor.

Indexes of a variant have its name before the suffix: ``model.safetensors.index.fp16.json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_sp.common.files import read_json

from .filesystem import sha256

INDEX_NAME = re.compile(r".+\.index(\..+)?\.json")


def is_index(path: Path) -> bool:
    """Whether a file is an index of shards, by its name."""
    return INDEX_NAME.fullmatch(path.name) is not None


@dataclass(frozen=True)
class ShardIndex:
    """An index of shards.

    Args:
        path: of the index; the shards are files of its folder.
        weight_map: tensor -> name of its file.
        metadata: "total_size" in bytes; in saves of this package also "sha256" of each file.
    """

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ShardIndex:
        """Read an index. The shards need not be there.

        Raises:
            ValueError: if it cannot be read, is no index, or names files of other folders.
        """
        try:
            content = read_json(path)
            index = cls(path, dict(content["weight_map"]), dict(content.get("metadata") or {}))
            names = sorted(set(index.weight_map.values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"files {names}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _no_index(path, repr(error)) from None

        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(
                f"got {path}, which names {outside[0]!r}; expected files of its own folder; do not "
                "use weights from this source"
            )
        return index

    @property
    def files(self) -> list[Path]:
        """The shards, sorted by name."""
        return [self.path.parent / name for name in sorted(set(self.weight_map.values()))]

    def check_complete(self) -> None:
        """Raise ValueError if there are no shards, or one is absent."""
        if not self.weight_map:
            raise _no_index(self.path, "it lists no files")

        absent = [file.name for file in self.files if not file.is_file()]
        if absent:
            raise ValueError(
                f"got {self.path}, of whose {len(self.files)} shards {len(absent)} are absent "
                f"({', '.join(absent[:4])}); expected all of them beside it; download or copy the "
                "rest"
            )

    def verify(self) -> None:
        """Raise ValueError if a shard is absent, or its SHA-256 is not the one of ``metadata``."""
        digests = self.metadata.get("sha256", {})
        for file in self.files:
            expected = digests.get(file.name)
            if not file.is_file() or (expected is not None and sha256(file) != expected):
                raise ValueError(
                    f"got a damaged checkpoint: {file} is not the file that {self.path.name} "
                    "lists; expected the files as they were saved; load another checkpoint"
                )


def _no_index(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"got {path}, which is not an index of shards ({reason}); expected JSON with a weight_map; "
        "download it again"
    )
