"""Further inputs of derived models: tensors of a sample that training and sampling read from files.

A model class names them with their axes, for example::

    extra_inputs = {"actions": "frames action_size", "layout": "classes t h w", "boxes": "32 7"}

Axes are separated by spaces:

* ``frames``: frames of the video. Where it comes first, a file may be longer than a clip, and is
  cut as the clip's frames are.
* ``t``, ``h``, ``w``: frames, height and width of the latents.
* a number, or the name of a whole number in the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FRAMES = "frames"


def extra_shapes(
    inputs: Mapping[str, str], config: Any, num_frames: int, latent_size: tuple[int, int, int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a sample's further inputs, by name.

    Args:
        latent_size: frames, height and width of the latents.

    Raises:
        ValueError: for an axis that is none.
    """
    frames, height, width = latent_size
    sizes = {FRAMES: num_frames, "t": frames, "h": height, "w": width}

    def size_of(name: str, axis: str) -> int:
        size = int(axis) if axis.isdecimal() else sizes.get(axis, getattr(config, axis, None))
        if not isinstance(size, int):
            raise ValueError(
                f"got the axis {axis!r} of {name} in extra_inputs; expected {FRAMES}, t, h, w, a "
                f"number, or a whole number of {type(config).__name__}; correct the model's class"
            )
        return size

    return {
        name: tuple(size_of(name, axis) for axis in axes.split()) for name, axes in inputs.items()
    }


def resolved_axes(inputs: Mapping[str, str], config: Any) -> dict[str, str]:
    """A model's ``extra_inputs``, with numbers in place of its settings."""
    resolved = {}
    for name, axes in inputs.items():
        resolved[name] = " ".join(str(getattr(config, axis, axis)) for axis in axes.split())
    return resolved


def cut_as_frames(inputs: Mapping[str, str]) -> frozenset[str]:
    """The names of inputs whose first axis counts frames of the video."""
    return frozenset(name for name, axes in inputs.items() if axes.split()[:1] == [FRAMES])
