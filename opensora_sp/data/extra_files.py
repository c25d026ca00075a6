"""Arrays that a model takes of a clip beside its video and caption, from files of NumPy.

Columns of the manifest, or a prompt's ``inputs``, name a ``.npy`` file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opensora_sp.common.files import open_regular

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ExtraFiles:
    """Which arrays there are, and how they are read.

    Attributes:
        names: of the arrays.
        per_frame: those whose first axis counts frames of the video. Their files may be longer than
            a clip, and are cut as its frames are.
        shapes_of: the shape of each array by its name, for a clip of (frames, height, width).
    """

    names: tuple[str, ...]
    per_frame: frozenset[str]
    shapes_of: Callable[[tuple[int, int, int]], Shapes]

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
            files: by name.
            clip: frames, height and width.
            start, interval: first frame of the clip in its video, and from one frame to the next.

        Raises:
            OSError: if a file cannot be opened.
            ValueError: if it is no array of numbers, or has another shape.
        """
        found = {}
        for name, shape in self.shapes_of(clip).items():
            frames = None
            if name in self.per_frame:
                frames = slice(start, start + (clip[0] - 1) * interval + 1, interval)
            found[name] = _read_array(files[name], name, shape, frames)
        return found


def _read_array(path: Path, name: str, shape: tuple[int, ...], frames: slice | None) -> Tensor:
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
