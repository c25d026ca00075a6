"""Captioned video and image files listed in a manifest, as clips of a requested size.

A derived model may take further arrays of a clip (``ExtraFiles``): columns of the manifest, or a
prompt's ``inputs``, name a ``.npy`` file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from opensora_sp.common.files import open_regular

from .limits import DEFAULT_LIMITS, Budget, Limits
from .manifest import Manifest
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

    ``frames`` are the requested ones of the cut clip, ``[first, stop)``; all by default.
    """

    clip: int
    epoch: int
    shape: ClipShape
    frames: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExtraFiles:
    """Further arrays of a clip, which NumPy files hold.

    Attributes:
        per_frame: names of arrays whose first axis counts frames of the video. Their files may be
            longer than a clip, and are cut as its frames are.
        shapes_of: the shape of each array by its name, for a clip of (frames, height, width).
    """

    names: tuple[str, ...]
    per_frame: frozenset[str]
    shapes_of: Callable[[tuple[int, int, int]], Mapping[str, tuple[int, ...]]]

    def read(
        self,
        files: Mapping[str, Path],
        clip: tuple[int, int, int],
        *,
        start: int = 0,
        interval: int = 1,
    ) -> dict[str, Tensor]:
        """The arrays of a clip, float32, by name.

        Args:
            clip: frames, height and width.
            start, interval: first frame of the clip in its video, and from one frame to the next.

        Raises:
            OSError: if a file cannot be opened.
            ValueError: if it is no array of numbers, or has another shape.
        """
        arrays = {}
        for name, shape in self.shapes_of(clip).items():
            frames = None
            if name in self.per_frame:
                frames = slice(start, start + (clip[0] - 1) * interval + 1, interval)
            arrays[name] = _read_array(files[name], name, shape, frames)
        return arrays


class VideoTextDataset(Dataset["Clip | CorruptSample"]):
    """Clips from a manifest, indexed by ``Sample``. Corrupt ones are ``CorruptSample``s.

    A clip is ``shape.num_frames`` frames, every ``frame_interval``-th, resized to cover the shape
    and cropped. Random crops and starts are drawn from (seed, epoch, clip), so parts of a clip that
    different ranks read fit together.

    Args:
        num_frames, image_size: what ``dataset[index]`` cuts clips to, where no shape is given.
        transform: "resize_center_crop" or "resize_random_crop".
        clip_start: take frames from the "middle" of a file, or from a "random" place.
        time_limit: seconds after which a file counts as corrupt.
        cache: keep decoded clips in memory; for small sets, with nothing random.
        limits: largest frames, clips and files; larger ones count as corrupt.
        extra: further arrays of a clip, whose files columns of the manifest name.
        remove_caption_prefix: remove beginnings of captions, see ``manifest.without_prefix``.

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
        remove_caption_prefix: bool = False,
    ) -> None:
        if cache and (transform, clip_start) != ("resize_center_crop", "middle"):
            raise ValueError(
                f"got cache=True with transform {transform!r} and clip_start {clip_start!r}; "
                "expected nothing random to be kept; drop dataset.cache, or take "
                "'resize_center_crop' and 'middle'"
            )
        files = () if extra is None else extra.names
        self.rows = Manifest(manifest, files, remove_prefix=remove_caption_prefix)
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
        clip = self._cached[key]
        if isinstance(clip, Clip):
            # A clip kept from an earlier epoch is used with the draws of this one.
            return replace(clip, key=(sample.epoch, sample.clip))
        return clip

    def _read(self, sample: Sample) -> Clip | CorruptSample:
        entry = self.rows[sample.clip]
        # Always three numbers, so that one option does not change the draws of another.
        start_at, top, left = generator(self.seed, "crop", sample.epoch, sample.clip).random(3)
        try:
            budget = Budget.of(self.time_limit, self.limits)
            frames, fps, extra = budget.run(partial(self._read_files, sample, start_at))
        except UNREADABLE as error:
            return CorruptSample(str(entry.path), f"{type(error).__name__}: {error}")
        crop = (top, left) if self.transform == "resize_random_crop" else None
        video = resize_and_crop(frames, (sample.shape.height, sample.shape.width), crop)
        return Clip(video, entry.text, fps, extra, key=(sample.epoch, sample.clip))

    def _read_files(
        self, sample: Sample, start_at: float, budget: Budget
    ) -> tuple[np.ndarray, float, Mapping[str, Tensor]]:
        entry, shape = self.rows[sample.clip], sample.shape
        first, stop = sample.frames or (0, shape.num_frames)
        # By the manifest where it states them: counting reads the whole file.
        available = entry.num_frames or count_frames(entry.path, budget)
        room = max(0, available - ((shape.num_frames - 1) * self.frame_interval + 1))
        is_middle = self.clip_start == "middle"
        start = room // 2 if is_middle else min(room, int(start_at * (room + 1)))
        frames, fps = read_video(
            entry.path,
            budget,
            num_frames=stop - first,
            interval=self.frame_interval,
            start=start + first * self.frame_interval,
            clip_frames=shape.num_frames,
        )

        # The rank with the first frame has them for the group.
        if self.extra is None or first != 0:
            return frames, fps, {}
        files = self.rows.files_of(sample.clip)
        return frames, fps, self.extra.read(files, shape, start=start, interval=self.frame_interval)


def _read_array(path: Path, name: str, shape: tuple[int, ...], frames: slice | None) -> Tensor:
    # A named pipe would block numpy.
    with open_regular(path):
        pass
    try:
        # Mapped, so nothing is allocated for a header that is wrong; pickles are refused.
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    # numpy evaluates the header as Python literals, whose errors are many.
    except Exception as error:
        raise ValueError(f"{path} is no array as np.save writes one ({error})") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path} is no array of numbers, as np.save writes one")

    cut = array if frames is None else array[frames]
    if cut.shape != shape:
        taken = "" if frames is None else f", of which the clip has {list(cut.shape)}"
        raise ValueError(f"{path} has shape {list(array.shape)}{taken}, and {name} {list(shape)}")

    values = torch.from_numpy(cut.astype(np.float32))
    if not values.isfinite().all():
        raise ValueError(f"{path} has numbers that are not finite")
    return values
