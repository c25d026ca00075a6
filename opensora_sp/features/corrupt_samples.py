"""Count of the files that could not be read: logged once each, and too many of them end the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sized
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.data.dataset import CorruptSample
from opensora_sp.data.manifest import Manifest
from opensora_sp.parallel import SequenceMesh

logger = logging.getLogger(__name__)
# Clips after which the fraction of corrupt ones is meaningful.
ENOUGH_READ = 100


class CorruptSamples:
    """Counts clips that were read and clips that were substituted because they were corrupt.

    ``read`` and ``substituted`` count micro-batches of whose group this rank is the first, so that
    a sum over ranks counts each. ``files_read`` counts by suffix those that this rank has shared.

    Args:
        max_bad_fraction: substituted clips of those read, over which ``report`` raises.
    """

    def __init__(self, rows: Manifest, mesh: SequenceMesh, max_bad_fraction: float) -> None:
        self.rows, self.mesh, self.max_bad_fraction = rows, mesh, max_bad_fraction
        self.files_read: Counter[str] = Counter()
        self.read, self.substituted = 0, 0
        self.found: dict[str, str] = {}  # path -> reason, of all ranks after ``report``
        self._unreported: dict[str, str] = {}

    def note(self, items: Iterable[Any]) -> None:
        """Remember the corrupt samples among what this rank has read."""
        for sample in items:
            if isinstance(sample, CorruptSample) and sample.path not in self.found:
                self._unreported[sample.path] = sample.reason

    def count_used(self, ids: Iterable[int]) -> None:
        """Count the clips of a micro-batch, after substitution."""
        suffixes = [self.rows[index].path.suffix for index in ids]
        self.files_read.update(suffixes)
        if self.mesh.sp_rank == 0:
            self.read += len(suffixes)

    def count_substituted(self, places: Sized) -> None:
        """Count the clips of the current group's micro-batch that are substituted."""
        if self.mesh.sp_rank == 0:
            self.substituted += len(places)

    @property
    def last(self) -> str:
        """Path and reason of the newest one that this rank knows of, ``PATH: REASON``."""
        return ": ".join(next(reversed((self.found | self._unreported).items()), ()))

    def report(self, device: torch.device) -> int:
        """Log new corrupt files on rank 0; returns the clips substituted so far. Collective.

        Raises:
            ValueError: on all ranks, if too many clips are corrupt.
        """
        counts = torch.tensor([self.read, self.substituted, len(self._unreported)], device=device)
        dist.all_reduce(counts)
        read, substituted, unreported = map(int, counts.tolist())

        # One small reduction in the usual case, objects only where there is news.
        if unreported:
            self._exchange_reports()
        if substituted > self.max_bad_fraction * max(read, min(ENOUGH_READ, len(self.rows))):
            raise ValueError(
                f"got {substituted} corrupt clips of {read} read, the last {self.last}; expected "
                f"at most dataset.max_bad_fraction = {self.max_bad_fraction:g} of them; check the "
                "files that train.log names, or raise max_bad_fraction"
            )
        return substituted

    def _exchange_reports(self) -> None:
        """Log what ranks have not reported yet. Collective."""
        reports: list[dict[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(reports, self._unreported)
        self._unreported = {}
        for corrupt in reports:
            for path, reason in corrupt.items():
                if path not in self.found and self.mesh.rank == 0:
                    logger.warning("skipped a clip: %s (%s)", path, reason)
                self.found.setdefault(path, reason)
