"""Captioned video and image files listed in a manifest, as clips of the size that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from .captions import Captions
from .extra_files import ExtraFiles
from .limits import DEFAULT_LIMITS, Limits
from .manifest import Entry, Manifest
from .randomness import generator
from .transforms import resize_and_crop
from .video import UNREADABLE, count_frames, read_video


@dataclass(frozen=True)
class Clip:
    """A clip, or some frames of it: ``video`` uint8 ``[3, F, height, width]``, caption, frame rate.

    ``transforms.scale`` converts it to what a VAE takes, on the device, so loaders transfer a
    quarter of the bytes. With its first frame comes ``extra``, see ``ExtraFiles``. ``key`` is the
    epoch and the number of the clip, of which draws are a function.
    """

    video: Tensor
    text: str
    fps: float
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    key: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class CorruptSample:
    """A file that could not be read, and the reason."""

    path: str
    reason: str


class ClipShape(NamedTuple):
    """Frames and pixels that a clip is cut to."""

    num_frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_frames} frames of {self.height}x{self.width}"


class Sample(NamedTuple):
    """One use of a clip: its number, the epoch (random crops depend on it), and its shape.

    ``frames`` are those of the cut clip that are requested, ``[first, stop)``; all by default.
    """

    clip: int
    epoch: int
    shape: ClipShape
    frames: tuple[int, int] | None = None


class VideoTextDataset(Dataset["Clip | CorruptSample"]):
    """Clips from a manifest, indexed by ``Sample``. Corrupt ones are ``CorruptSample``s.

    A clip is ``shape.num_frames`` frames, every ``frame_interval``-th, resized to cover the shape
    and cropped. Random crops and starts are drawn from (seed, epoch, clip), so parts of a clip that
    different ranks read fit together.

    Args:
        manifest: a file, see ``Manifest``.
        num_frames, image_size: what ``dataset[index]`` cuts clips to, where no shape is given.
        frame_interval: take every n-th frame.
        transform: "resize_center_crop" or "resize_random_crop".
        clip_start: take frames from the "middle" of a file, or from a "random" place.
        time_limit: seconds after which a file counts as corrupt.
        cache: keep decoded clips in memory; for small sets, with nothing random.
        seed: of random crops and starts.
        limits: largest frames, clips and files; larger ones count as corrupt.
        extra: further arrays of a clip, whose files columns of the manifest name.
        captions: how the manifest's captions are changed.

    Raises:
        ValueError: if the manifest cannot be used, or ``cache`` would freeze random crops.
    """

    def __init__(
        self,
        manifest: str,
        *,
        num_frames: int | None = None,
        image_size: tuple[int, int] | None = None,
        frame_interval: int = 1,
        transform: Literal["resize_center_crop", "resize_random_crop"] = "resize_center_crop",
        clip_start: Literal["middle", "random"] = "middle",
        time_limit: float = 60.0,
        cache: bool = False,
        seed: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        extra: ExtraFiles | None = None,
        captions: Captions | None = None,
    ) -> None:
        if cache and (transform, clip_start) != ("resize_center_crop", "middle"):
            raise ValueError(
                f"got cache=True with transform {transform!r} and clip_start {clip_start!r}; "
                "expected nothing random to be kept; drop dataset.cache, or take "
                "'resize_center_crop' and 'middle'"
            )
        self.rows = Manifest(manifest, () if extra is None else extra.names, captions)
        self.extra = extra
        self.shape = None
        if num_frames is not None and image_size is not None:
            self.shape = ClipShape(num_frames, *image_size)
        self.frame_interval, self.transform, self.clip_start = frame_interval, transform, clip_start
        self.time_limit, self.limits, self.seed = time_limit, limits, seed
        self._cached: dict[tuple[Any, ...], Clip | CorruptSample] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> dict[str, str]:
        """See ``Manifest.fingerprint``."""
        return self.rows.fingerprint

    def __getitem__(self, sample: int | Sample) -> Clip | CorruptSample:
        if not isinstance(sample, Sample):
            assert self.shape is not None, "a dataset without a shape takes samples, not indices"
            sample = Sample(sample, 0, self.shape)
        if self._cached is None:
            return self._read(sample)

        key = sample.clip, sample.shape, sample.frames
        if key not in self._cached:
            self._cached[key] = self._read(sample)
        found = self._cached[key]
        if isinstance(found, Clip):
            return replace(found, key=(sample.epoch, sample.clip))
        return found

    def _read(self, sample: Sample) -> Clip | CorruptSample:
        entry, shape = self.rows[sample.clip], sample.shape
        first, stop = sample.frames or (0, shape.num_frames)
        extra: Mapping[str, Tensor] = {}
        start_at, top, left = generator(self.seed, "crop", sample.epoch, sample.clip).random(3)

        try:
            start = self._start(entry, shape.num_frames, start_at)
            frames, fps = read_video(
                entry.path,
                num_frames=stop - first,
                interval=self.frame_interval,
                start=start + first * self.frame_interval,
                clip_frames=shape.num_frames,
                time_limit=self.time_limit,
                limits=self.limits,
            )
            if self.extra is not None and first == 0:
                extra = self.extra.read(
                    self.rows.files_of(sample.clip),
                    shape,
                    start=start,
                    interval=self.frame_interval,
                )
        except UNREADABLE as error:
            return CorruptSample(str(entry.path), f"{type(error).__name__}: {error}")

        crop = (top, left) if self.transform == "resize_random_crop" else None
        video = resize_and_crop(frames, (shape.height, shape.width), crop)
        return Clip(video, entry.text, fps, extra, key=(sample.epoch, sample.clip))

    def _start(self, entry: Entry, num_frames: int, share: float) -> int:
        """The first frame to read: of the middle, or at this share of the possible starts."""
        available = entry.num_frames or count_frames(
            entry.path, time_limit=self.time_limit, limits=self.limits
        )
        room = max(0, available - ((num_frames - 1) * self.frame_interval + 1))
        return room // 2 if self.clip_start == "middle" else min(room, int(share * (room + 1)))
