"""Conditioning frames of references, and the notation of their places in a video.

The notation is from Open-Sora 1.2: insertions separated by ``;``, each up to six numbers
separated by ``,``

    loop, reference, first frame of the reference, first frame of the video, frames, edit

with the defaults ``0, 0, 0, 0, 1, 0.0``. Frames are frames of latents, and a negative
first frame counts from the end. ``edit`` is the share of the noise schedule in which a frame is
generated: 0 keeps it, 1 replaces it.

Legend: c latent channels, f latent frames, h x w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from opensora_sp.diffusion.guidance import ConditioningFrames


@dataclass(frozen=True)
class Insertion:
    """``length`` frames of a reference, put into the video of one loop."""

    loop: int = 0
    reference: int = 0
    reference_start: int = 0
    start: int = 0
    length: int = 1
    edit: float = 0.0

    def __str__(self) -> str:
        return ",".join(str(number) for number in astuple(self))


def parse_mask_strategy(text: str) -> list[Insertion]:
    """``"0,0,0,0,1,0.0;1,0,-1"`` -> insertions; empty text gives none.

    Raises:
        ValueError: for anything but up to six numbers, a loop or reference below 0, a length below
            1, or an edit outside [0, 1].
    """
    return [_parse_insertion(part.strip(), text) for part in text.split(";") if part.strip()]


def _parse_insertion(part: str, text: str) -> Insertion:
    numbers = [number.strip() for number in part.split(",")]
    types = (int, int, int, int, int, float)

    try:
        if len(numbers) > len(types):
            raise ValueError
        insertion = Insertion(*(parse(number) for parse, number in zip(types, numbers)))
        counts_fit = min(insertion.loop, insertion.reference) >= 0 and insertion.length >= 1
        if not (counts_fit and 0 <= insertion.edit <= 1):
            raise ValueError

    except ValueError:
        raise ValueError(
            f"got {part!r} in mask strategy {text!r}; expected up to six numbers: loop, reference, "
            "first frame of the reference, first frame of the video, frames (at least 1), edit (0 "
            "to 1); write for example '0,0,0,0,1,0.0'"
        ) from None
    return insertion


def insert_references(
    latent: Tensor,
    references: Sequence[Tensor],
    insertions: Sequence[Insertion],
    *,
    loop: int,
    align: int | None,
) -> tuple[Tensor, Tensor]:
    """Put frames of references into a video's latent.

    Args:
        latent: ``[c, f, h, w]``, the noise or latent to put them into; not changed.
        references: latents ``[c, f_i, h, w]``.
        insertions: other loops than ``loop`` are ignored; later insertions overwrite earlier
            ones.
        align: move first frames to the nearest multiple of this, the latent frames of a chunk of
            the autoencoder; None leaves them.

    Returns:
        The latent, and float ``[f]``: the edit of each frame, 1 where it is generated from noise.

    Raises:
        ValueError: if an insertion names a reference or a frame that does not exist.
    """
    latent = latent.clone()
    num_frames = latent.shape[1]
    mask = torch.ones(num_frames, device=latent.device)

    for insertion in insertions:
        if insertion.loop != loop:
            continue

        _check_reference(insertion, len(references))
        reference = references[insertion.reference]
        available = reference.shape[1]
        source = _first_frame(insertion.reference_start, available, align, insertion, "reference")
        target = _first_frame(insertion.start, num_frames, align, insertion, "video")

        # Frames beyond either end are cut off.
        length = min(insertion.length, available - source, num_frames - target)
        latent[:, target : target + length] = reference[:, source : source + length]
        mask[target : target + length] = insertion.edit
    return latent, mask


def check_insertions(
    insertions: Sequence[Insertion], references: Sequence[int], *, frames: int, loops: int
) -> None:
    """Check insertions from frame counts alone, before anything is decoded.

    Args:
        references: latent frames of each reference.
        frames: latent frames of each of the ``loops`` parts of the video. From the second part on,
            the part before is one more reference.

    Raises:
        ValueError: for a loop, a reference or a frame that does not exist.
    """
    for insertion in insertions:
        if insertion.loop >= loops:
            raise ValueError(
                f"got mask strategy {insertion} for loop {insertion.loop} of a video with {loops} "
                "of them, counted from 0; expected a loop that is sampled; change the first "
                "number, or raise loop"
            )
        known = [*references, frames] if insertion.loop else list(references)
        _check_reference(insertion, len(known))
        available = known[insertion.reference]
        _first_frame(insertion.reference_start, available, None, insertion, "reference")
        _first_frame(insertion.start, frames, None, insertion, "video")


def _check_reference(insertion: Insertion, count: int) -> None:
    if insertion.reference >= count:
        raise ValueError(
            f"got mask strategy {insertion} with {count} references; expected a reference below "
            "that number (the first is 0); pass more references or change the second number"
        )


def _first_frame(
    start: int, frames: int, align: int | None, insertion: Insertion, what: str
) -> int:
    first = start + frames if start < 0 else start
    if not 0 <= first < frames:
        raise ValueError(
            f"got mask strategy {insertion} for a {what} of {frames} latent frames; expected a "
            f"first frame from {-frames} to {frames - 1}; change it"
        )
    return first if align is None else nearest_point(first, align, frames)


def nearest_point(frame: int, grid: int, maximum: int) -> int:
    """The multiple of ``grid`` nearest to ``frame``, the lower one of two.

    The ``grid`` numbers from there on are all below ``maximum``.
    """
    below, rest = divmod(frame, grid)
    rounds_up = 2 * rest > grid and below + 1 < maximum // grid
    return (below + rounds_up) * grid


def frames_of_kind(
    kind: str,
    references: Sequence[Tensor],
    previous: Tensor | None,
    *,
    loop: int,
    loops: int,
    length: int,
    latent: Tensor,
) -> ConditioningFrames:
    """The conditioning frames of one loop, as Open-Sora 1.3 names them; the others are 0.

    The first loop begins with the first frame of the first reference ("i2v_head", "i2v_loop") or
    with up to ``length`` of them ("v2v_head"), the later ones with the last ``length`` frames of
    the loop before. "i2v_loop" ends with the first frame of the second reference, or else the last
    of the first: in a single loop, or in each later one. "i2v_tail" ends the last of
    several loops so, and a single loop always with the last frame of the first reference.

    Args:
        kind: "i2v_head", "i2v_tail", "i2v_loop" or "v2v_head".
        references: latents ``[c, f_i, h, w]``, at least one.
        previous: latents ``[c, f, h, w]`` of the loop before.
        latent: ``[c, f, h, w]``, for shape, dtype and device.
    """
    head = tail = latent[:, :0]
    if previous is not None:
        head = previous[:, -length:]
    elif kind != "i2v_tail":
        head = references[0][:, : length if kind == "v2v_head" else 1]

    has_tail = {"i2v_loop": loop > 0 or loops == 1, "i2v_tail": loop == loops - 1}
    if has_tail.get(kind, False):
        is_second = len(references) > 1 and (kind == "i2v_loop" or loop > 0)
        tail = references[1][:, :1] if is_second else references[0][:, -1:]

    frames, num_frames = torch.zeros_like(latent), latent.shape[1]
    # Where both do not fit, the end wins.
    head = head[:, : num_frames - tail.shape[1]]
    frames[:, : head.shape[1]] = head
    frames[:, num_frames - tail.shape[1] :] = tail
    index = [*range(head.shape[1]), *range(num_frames - tail.shape[1], num_frames)]
    return ConditioningFrames(frames[None], index)
