"""Buckets in the format of Open-Sora 1.2: which clips are trained on at which size and length.

``bucket_config = {"144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27)}}`` maps resolution
and frames to (keep probability, batch size). A clip is assigned to the largest resolution that it
has at least 0.8 of the pixels of, and there to the largest number of frames that it is longer than.
It is kept there with the keep probability; if not, it tries the next resolution. Of a pair of
probabilities, the second decides whether this number of frames is used at all. A batch size of
None is chosen when training starts (``training/memory_fit.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from opensora_sp.common.importing import nearest

from .dataset import ClipShape
from .resolutions import SIZES, closest_aspect, num_pixels

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Entry = tuple[Probability | tuple[Probability, Probability], Positive | None]
ByFrames = Annotated[dict[Positive, Entry], Field(min_length=1)]
CONFIG = TypeAdapter(Annotated[dict[str, ByFrames], Field(min_length=1)])
# Share of a resolution's pixels that a clip must have.
MIN_PIXEL_SHARE = 0.8
UNKNOWN, SMALL, SHORT, CHANCE = -1, -2, -3, -4
DROPPED = {
    UNKNOWN: "frames or size not in the manifest (opensora-sp index fills them in)",
    SMALL: "fewer pixels than any resolution requires",
    SHORT: "too few frames, or an image where no bucket has 1 frame",
    CHANCE: "dropped by keep probabilities, drawn anew in each epoch",
}
"""Why a clip is in no bucket."""


CHOSEN_AT_START = 0
"""The batch size of a ``BatchSpec`` whose bucket leaves it out."""


@dataclass(frozen=True)
class BatchSpec:
    """Batches of ``batch_size`` clips of ``num_frames`` frames, ``image_size`` pixels each."""

    batch_size: int
    num_frames: int
    image_size: tuple[int, int]


class BucketEntry(NamedTuple):
    """One entry of a bucket config."""

    resolution: str
    num_frames: int
    keep: float
    keep_frames: float | None  # probability of taking this number of frames at all
    batch_size: int | None  # 0 where nothing is kept, None where it is chosen at the start

    @property
    def name(self) -> str:
        return f"{self.resolution} x {self.num_frames}"

    def fits(self, num_frames: np.ndarray, interval: int) -> np.ndarray:
        """True where files of so many frames are long enough; see ``Buckets.assign``."""
        fits: np.ndarray = num_frames > self.num_frames * interval
        return num_frames == 1 if self.num_frames == 1 else fits

    def shape_at(self, aspect_ratio: float) -> ClipShape:
        """The shape that clips of a height over width are cut to."""
        aspect = closest_aspect(self.resolution, aspect_ratio, 1.0)
        return ClipShape(self.num_frames, *SIZES[self.resolution][aspect])


@dataclass(frozen=True)
class Buckets:
    """The entries of a bucket config, in the order in which a clip tries them: largest first."""

    entries: tuple[BucketEntry, ...]

    @classmethod
    def of(cls, config: Mapping[str, Mapping[int, Any]]) -> Buckets:
        """Check a bucket config.

        Raises:
            ValueError: naming the entry that cannot be used.
        """
        try:
            checked = CONFIG.validate_python(config)
        except ValidationError as error:
            part: Any
            place, part = "", config
            for key in error.errors()[0]["loc"][:2]:
                if isinstance(part, Mapping) and key in part:
                    place, part = f"{place}[{key!r}]", part[key]
            raise ValueError(
                f"got bucket_config{place} = {part!r} ({error.errors()[0]['msg']}); expected for "
                "example {'240p': {51: (1.0, 4)}}: (probability, batch size), or ((probability, "
                "probability of these frames), batch size), by resolution and frames; a batch size "
                "of None is chosen at the start; correct it"
            ) from None
        unknown = [name for name in checked if name not in SIZES]
        if unknown:
            raise ValueError(
                f"got the resolution {unknown[0]!r} in bucket_config; expected one of "
                f"{list(SIZES)}; {nearest(unknown[0], SIZES)}"
            )

        entries = []
        for resolution in sorted(checked, key=num_pixels, reverse=True):
            for num_frames, entry in sorted(checked[resolution].items(), reverse=True):
                entries.append(_entry(resolution, num_frames, *entry))
        if not any(entry.keep for entry in entries):
            raise ValueError(
                "got a bucket_config that keeps no clip; expected a keep probability over 0; raise "
                "one"
            )
        return cls(tuple(entries))

    @property
    def kept(self) -> list[BucketEntry]:
        """The entries that keep clips."""
        return [entry for entry in self.entries if entry.keep]

    @property
    def without_batch_size(self) -> list[str]:
        """The names of the entries whose batch size is chosen at the start."""
        return [entry.name for entry in self.kept if entry.batch_size is None]

    @property
    def largest(self) -> BucketEntry:
        """The entry of the clips of most frames x pixels."""
        return max(self.kept, key=lambda entry: entry.num_frames * num_pixels(entry.resolution))

    def assign(
        self,
        num_frames: np.ndarray,
        height: np.ndarray,
        width: np.ndarray,
        *,
        interval: int,
        draws: np.ndarray,
    ) -> np.ndarray:
        """The entry of each of N clips, or the reason why it has none.

        Args:
            num_frames, height, width: ``[N]``, NaN where not known; 1 frame is an image.
            interval: a clip of f frames is every ``interval``-th of a file, which must have more
                than ``f * interval``.
            draws: uniform numbers in [0, 1) ``[N, entries, 2]``; an entry with one probability uses
                the first.

        Returns:
            int64 ``[N]``: numbers of entries, or keys of ``DROPPED``.
        """
        pixels = height * width
        assigned = np.where(np.isnan(pixels) | np.isnan(num_frames), UNKNOWN, SMALL)
        for first, last in self._resolutions():
            enough = pixels >= MIN_PIXEL_SHARE * num_pixels(self.entries[first].resolution)
            candidates = (assigned < 0) & enough
            # Until an entry of this resolution is long enough for it.
            assigned[candidates & (assigned == SMALL)] = SHORT

            for number in range(first, last):
                entry, drawn = self.entries[number], draws[:, number]
                tries = taken = candidates & entry.fits(num_frames, interval)
                if entry.keep_frames is not None:
                    taken = tries & (drawn[:, 0] <= entry.keep_frames)

                assigned[tries] = CHANCE
                kept = drawn[:, 0 if entry.keep_frames is None else 1] < entry.keep
                assigned[taken & kept] = number
                # A clip that is not kept tries the next resolution.
                candidates &= ~taken
        return assigned

    def possible(
        self, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, *, interval: int
    ) -> list[int]:
        """Numbers of the entries that some clip is large and long enough for.

        Keep probabilities and larger resolutions may leave an entry without clips all the same.

        Args:
            num_frames, height, width, interval: as of ``assign``.
        """
        pixels, numbers = height * width, []
        for number, entry in enumerate(self.entries):
            is_large_enough = pixels >= MIN_PIXEL_SHARE * num_pixels(entry.resolution)
            if entry.keep and (is_large_enough & entry.fits(num_frames, interval)).any():
                numbers.append(number)
        return numbers

    def _resolutions(self) -> Iterator[tuple[int, int]]:
        """The entries ``[first, last)`` of each resolution."""
        first = 0
        for _, entries in groupby(self.entries, key=lambda entry: entry.resolution):
            last = first + len(list(entries))
            yield first, last
            first = last


def batch_sizes_of(config: Mapping[str, Mapping[Any, Any]]) -> dict[str, int]:
    """Batch sizes in a bucket config, also of a checkpoint, by the names of its entries."""
    sizes = {}
    for resolution, by_frames in config.items():
        for num_frames, (_, batch_size) in by_frames.items():
            if batch_size is not None:
                sizes[f"{resolution} x {num_frames}"] = batch_size
    return sizes


def with_batch_sizes(
    config: Mapping[str, Mapping[int, Any]], sizes: Mapping[str, int]
) -> dict[str, dict[int, Any]]:
    """A bucket config with other batch sizes, by the names of the entries."""
    changed = {resolution: dict(by_frames) for resolution, by_frames in config.items()}
    for entry in Buckets.of(config).kept:
        if entry.name in sizes:
            by_frames = changed[entry.resolution]
            keep, _ = by_frames[entry.num_frames]
            by_frames[entry.num_frames] = (keep, sizes[entry.name])
    return changed


def _entry(resolution: str, num_frames: int, keep: Any, batch_size: int | None) -> BucketEntry:
    keep, keep_frames = keep if isinstance(keep, tuple) else (keep, None)
    if keep_frames is not None and num_frames == 1:
        raise ValueError(
            f"got two probabilities in bucket_config[{resolution!r}][1]; expected one for images, "
            "which have one length; remove the second"
        )
    # Open-Sora has batch sizes of None there.
    return BucketEntry(resolution, num_frames, keep, keep_frames, batch_size if keep else 0)
