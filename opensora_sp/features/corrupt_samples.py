"""Account of the clips that could not be read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.data import BrokenClip, Manifest
from opensora_sp.parallel import SequenceMesh

logger = logging.getLogger(__name__)
ENOUGH_READ = 100  # clips, after which a fraction of broken ones means something


class BrokenClips:
    """Counts clips used and replaced, and tells of broken ones.

    ``read`` clips were used and ``replaced`` got another one; both are equal on all ranks of an SP group.
    ``files_read`` counts the clips used by kind of file.
    """

    def __init__(self, rows: Manifest, mesh: SequenceMesh, max_bad_fraction: float) -> None:
        self.rows, self.mesh, self.max_bad_fraction = rows, mesh, max_bad_fraction
        self.files_read: Counter[str] = Counter()
        self.read, self.replaced = 0, 0
        self.found: dict[str, str] = {}  # path -> reason, of all ranks after ``tell``
        self._untold: dict[str, str] = {}  # what this rank has found since

    def note(self, items: Iterable[Any]) -> None:
        """Remember the broken ones among what this rank has read."""
        for item in items:
            if isinstance(item, BrokenClip) and item.path not in self.found:
                self._untold[item.path] = item.reason

    def count_used(self, ids: Iterable[int]) -> None:
        suffixes = [self.rows[index].path.suffix for index in ids]
        self.files_read.update(suffixes)
        self.read += len(suffixes)

    @property
    def last(self) -> tuple[str, str] | None:
        """Path and reason of the newest one that this rank knows of."""
        return next(reversed(({**self.found, **self._untold}).items()), None)

    def tell(self, device: torch.device) -> int:
        """Log what was found broken, each path once, on rank 0; returns the clips replaced so far. Collective.

        Raises:
            ValueError: if too many clips are broken.
        """
        counts = torch.tensor([self.read, self.replaced, len(self._untold)], device=device)
        dist.all_reduce(counts)
        read, replaced, untold = counts.tolist()
        read, replaced = read // self.mesh.sp_size, replaced // self.mesh.sp_size
        if untold:
            found: list[dict[str, str]] = [{}] * dist.get_world_size()
            dist.all_gather_object(found, self._untold)
            new = {
                path: reason
                for of_rank in found
                for path, reason in of_rank.items()
                if path not in self.found
            }
            for path, reason in new.items() if self.mesh.rank == 0 else ():
                logger.warning("skipped a clip that cannot be read: %s (%s)", path, reason)
            self.found |= new
            self._untold = {}
        if replaced > self.max_bad_fraction * max(read, min(ENOUGH_READ, len(self.rows))):
            raise ValueError(
                f"got {replaced} broken clips of {read} read, the last {self.last}; expected at most "
                f"dataset.max_bad_fraction = {self.max_bad_fraction:g} of them; check the files that train.log names, "
                "or raise max_bad_fraction"
            )
        return replaced
