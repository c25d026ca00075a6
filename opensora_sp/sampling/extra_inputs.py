"""Further inputs of a derived model in sampling, from the files that a prompt names.

A video of several loops has one file for each input. One that begins with ``frames`` continues from
loop to loop, as the video does. One without time is the same in all loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from opensora_sp.config import InferenceConfig
from opensora_sp.data.video import UNREADABLE

from .decoding import frames_of

if TYPE_CHECKING:
    from .requests import Request


def first_frames(
    cfg: InferenceConfig, request: Request, latent_size: Callable[..., tuple[int, int, int]]
) -> list[int]:
    """The first frame of each loop in the whole video.

    Args:
        latent_size: of the autoencoder for frames, height and width.
    """
    if cfg.loop == 1:
        return [0]
    shared = frames_of(latent_size, cfg.condition_frame_length, request.num_frames, request.size)
    return [loop * (request.num_frames - shared) for loop in range(cfg.loop)]


def extra_inputs(cfg: InferenceConfig, request: Request, start: int = 0) -> dict[str, Tensor]:
    """The further inputs of the model for one loop of a video, float32, by name.

    Args:
        start: the first frame of the loop in the whole video.

    Raises:
        ValueError: if some are missing, too many, or cannot be read.
    """
    files = cfg.extra_files
    names = [] if files is None else list(files.names)
    if request.inputs.keys() != set(names):
        raise ValueError(
            f"got inputs {list(request.inputs)} for {request.prompt.text!r}; expected files of "
            f"{names}, which the model {cfg.model_spec.name!r} takes beside the prompt; set inputs "
            "of the prompt, for example inputs=dict(actions='actions.npy')"
        )
    _check_loops(cfg)
    try:
        return {} if files is None else files.read(request.inputs, request.shape, start=start)
    except UNREADABLE as error:
        raise ValueError(
            f"got inputs of {request.prompt.text!r} that cannot be read for the frames from "
            f"{start} on ({error}); expected a .npy file of numbers for each, in the shape of the "
            "model's extra_inputs, with the frames of all loops; correct it"
        ) from None


def _check_loops(cfg: InferenceConfig) -> None:
    """Raise ValueError if an input cannot be continued from loop to loop."""
    for name, axes in cfg.model_spec.model_class.extra_inputs.items():
        _, *others = axes.split()
        if cfg.loop > 1 and ("t" in axes.split() or "frames" in others):
            raise ValueError(
                f"got loop {cfg.loop} with the input {name} of axes {axes!r}; expected loop=1, or "
                "inputs that begin with 'frames' or have no time, since those of latent frames "
                "belong to one loop; set loop=1"
            )
