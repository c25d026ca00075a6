"""Files of a sampling run: mp4, GIF or PNG, a contact sheet, and a JSON file of metadata.

Frames are written as they arrive. A file gets its final name when it is complete. The JSON file
comes last: if it exists, so do the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from opensora_sp.checkpoint.adapters import Adapters
from opensora_sp.checkpoint.filesystem import sha256
from opensora_sp.checkpoint.paths import weight_files
from opensora_sp.common.console import RANK_LOCAL
from opensora_sp.common.files import read_json
from opensora_sp.config import InferenceConfig
from opensora_sp.data.video import Mp4
from opensora_sp.parallel import SequenceMesh

from .contact_sheet import drawable, shown_frames, write_contact_sheet
from .decoding import writer_of
from .pipeline import Pipeline
from .requests import Request, steps_of_video

logger = logging.getLogger(__name__)

# The folder of videos whose names are their prompts.
VIDEOS = "videos"
# The key of digests of the files that a video was made of.
DIGESTS = "input_sha256"


class Images:
    """A GIF that repeats forever, with 256 colours per frame, or a PNG of a single frame."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps = path, fps
        self.images: list[Image.Image] = []

    def add(self, frames: np.ndarray) -> None:
        self.images += map(Image.fromarray, frames)

    def close(self) -> None:
        if self.images:
            first, *rest = self.images
            duration = round(1000 / self.fps)
            first.save(
                self.path, save_all=bool(rest), append_images=rest, duration=duration, loop=0
            )


FORMATS: dict[str, type[Mp4 | Images]] = {"mp4": Mp4, "gif": Images, "png": Images}


class Output:
    """The files of one video while they are written: ``add`` frames, then ``finish`` or ``abort``.

    Args:
        facts: metadata for the JSON file; ``format`` is the kind of the video file.
        total: number of frames of the whole video.
    """

    def __init__(self, folder: Path, request: Request, facts: dict[str, Any], total: int) -> None:
        self.path = media_path(folder, request, facts)
        self.sheet = folder / f"{request.name}.png"
        self.metadata = folder / f"{request.name}.json"
        if request.own_name is not None:
            self.path.parent.mkdir(exist_ok=True)
        self.title = drawable(request.prompt.text, f"video {request.index:03d}")
        self.name, self.facts = request.name, facts

        # Nothing has its final name before it is complete.
        self.partial = _partial(self.path)
        fps = facts.get("save_fps") or request.fps
        self.file = FORMATS[facts["format"]](self.partial, fps)
        self.closed = False

        # Frames of the contact sheet.
        self.sheet_indices = set(shown_frames(total).tolist())
        self.sheet_frames: list[np.ndarray] = []
        self.count = 0

    def add(self, frames: np.ndarray) -> None:
        """Write the next frames, uint8 ``[F, height, width, 3]``."""
        self.file.add(frames)
        for index, frame in enumerate(frames, self.count):
            if index in self.sheet_indices:
                self.sheet_frames.append(frame)
        self.count += len(frames)

    def finish(self) -> Path:
        """Give the files their final names; returns the video's path."""
        self._close()

        # Files of an earlier request must not stay with this video.
        self.metadata.unlink(missing_ok=True)
        for kind in ("mp4", "gif"):
            self.path.with_name(f"{self.name}.{kind}").unlink(missing_ok=True)
        os.replace(self.partial, self.path)

        if self.facts["format"] != "png":
            sheet = _partial(self.sheet)
            write_contact_sheet(sheet, [(self.title, np.stack(self.sheet_frames))])
            os.replace(sheet, self.sheet)

        # Lone surrogates, from command lines that are not UTF-8, become JSON escapes.
        text = json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n"
        metadata = _partial(self.metadata)
        metadata.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(metadata, self.metadata)
        return self.path

    def abort(self) -> None:
        """Remove incomplete files, where the disk allows it."""
        # Failing to close it may be the reason for the abort.
        with suppress(Exception):
            self._close()
        for path in (self.path, self.sheet, self.metadata):
            with suppress(OSError):
                _partial(path).unlink(missing_ok=True)

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self.file.close()


def write_batch(
    pipeline: Pipeline,
    batch: list[Request],
    parts: list[torch.Tensor],
    mesh: SequenceMesh,
    folder: Path,
    digest: str | None,
    errors: list[str] | None = None,
) -> list[Path]:
    """Decode and write the latents of a batch; returns the files of this rank. Collective.

    Args:
        parts: the result of ``Pipeline.looped``.
        digest: SHA-256 of the weights; None while they are being trained.
        errors: takes the errors of videos that cannot be written, which end nothing else; None
            raises the first error.
    """
    outputs = _BatchOutputs(errors)
    try:
        for index, request in enumerate(batch):
            if writer_of(index, mesh) == mesh.sp_rank:
                facts = facts_of(pipeline.cfg, request, digest)
                with outputs.writing(index):
                    outputs[index] = Output(folder, request, facts, pipeline.num_frames(request))

        for index, frames in pipeline.frames(batch, parts, mesh):
            # The frames of others are decoded too: ranks do that together.
            if index in outputs:
                with outputs.writing(index):
                    outputs[index].add(frames)

        written = []
        for index in list(outputs):
            with outputs.writing(index):
                written.append(outputs[index].finish())
    except BaseException:
        for output in outputs.values():
            output.abort()
        raise

    for path in written:
        logger.info("rank %d wrote %s", mesh.rank, path, extra=RANK_LOCAL)
    return written


class _BatchOutputs(dict[int, Output]):
    """This rank's files of a batch, by the video's index. See ``write_batch`` for ``errors``."""

    def __init__(self, errors: list[str] | None) -> None:
        self.errors = errors

    @contextmanager
    def writing(self, index: int) -> Iterator[None]:
        """Inside, one video is written; where errors are collected, one drops only this video."""
        try:
            yield
        except Exception as error:
            if self.errors is None:
                raise
            self.errors.append(f"{type(error).__name__}: {error}")
            if index in self:
                self.pop(index).abort()


def media_path(folder: Path, request: Request, facts: dict[str, Any]) -> Path:
    """The path of a request's video, or single frame.

    VBench takes every file of a folder for a video, so those named for it have one of their own.
    """
    if request.own_name is not None:
        folder = folder / VIDEOS
    return folder / f"{request.name}.{facts['format']}"


def facts_of(
    cfg: InferenceConfig, request: Request, fingerprint: str | None = None
) -> dict[str, Any]:
    """Metadata of a video, as JSON values. ``fingerprint`` is the SHA-256 of the weights."""
    facts: dict[str, Any] = {
        "prompt": request.prompt.text,
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
        "place": request.place,
        "sample": request.sample,
        "num_frames": request.num_frames,
        "image_size": list(request.size),
        "fps": request.fps,
        "reference_path": request.prompt.reference_path,
        "mask_strategy": request.prompt.mask_strategy,
        "format": "png" if request.num_frames == 1 and cfg.loop == 1 else cfg.format,
        "ckpt": cfg.ckpt,
        "checkpoint_sha256": fingerprint,
    }

    names: tuple[str, ...] = ("loop", "condition_frame_length", "condition_frame_edit", "save_fps")
    facts |= {key: getattr(cfg, key) for key in names}
    if cfg.cond_type is not None:
        facts["cond_type"] = cfg.cond_type
    if cfg.lora:
        facts["lora"] = cfg.lora
    if request.inputs:
        facts["inputs"] = {name: str(path) for name, path in request.inputs.items()}
    steps = steps_of_video(cfg, request.shape)
    for name in ("computed", "guided"):
        if not all(getattr(step, name) for step in steps):
            facts[f"{name}_steps"] = [i for i, step in enumerate(steps) if getattr(step, name)]
    if request.digests:
        facts[DIGESTS] = dict(request.digests)

    names = ("model", "vae", "text_encoder", "scheduler", "precision", "use_ema", "convert")
    facts["config"] = {key: getattr(cfg, key) for key in names}
    # As they are read back: tuples are lists, so that they compare equal.
    return json.loads(json.dumps(facts))


def with_digests(requests: Sequence[Request]) -> list[Request]:
    """The requests with the digests of their files, each of which is read once."""
    digest = cache(sha256)
    return [
        replace(request, digests={str(path): digest(path) for path in request.files})
        for request in requests
    ]


def differences(folder: Path, request: Request, facts: dict[str, Any]) -> list[str] | None:
    """Keys in which an existing, complete video's metadata differ; None if there is no video."""
    path, metadata = media_path(folder, request, facts), folder / f"{request.name}.json"
    if not metadata.is_file():
        return None

    try:
        existing = read_json(metadata)
    except ValueError:
        existing = None
    if not isinstance(existing, dict):
        return ["a JSON that cannot be read"]

    # The paths of weights and adapters may change; their SHA-256 may not.
    compared = [key for key in facts if key not in ("ckpt", "lora")]
    differing = [key for key in compared if existing.get(key) != facts[key]]
    if not differing and not path.is_file():
        return None
    return differing


def fingerprint(weights: Path, adapters: Sequence[Adapters] = ()) -> str:
    """SHA-256 of weights in one or several files. With adapters, also of these and their scales."""
    digests = [sha256(file) for file in weight_files(weights)]
    for adapter in adapters:
        digests += [sha256(file) for file in weight_files(adapter.path)]
        digests.append(repr(adapter.scale * adapter.kind.scaling))
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
