"""Sampling requests: one for each video, and the batches that they are sampled in."""

from __future__ import annotations

import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.config.sections import PromptOptions
from opensora_sp.data.limits import Limits
from opensora_sp.data.randomness import normal
from opensora_sp.data.resolutions import SIZES
from opensora_sp.data.video import UNREADABLE, Probed, probe
from opensora_sp.diffusion.cached_steps import SamplingStep, sampling_steps
from opensora_sp.encoders import (
    planned_decoded_frames,
    planned_latent_size,
    planned_whole_frames,
)
from opensora_sp.encoders.interface import frames_of

from .prompts import Prompt, parse_prompt, prompt_of_loop, with_scores
from .reference_frames import check_insertions

logger = logging.getLogger(__name__)
NAME_CHARACTERS, NAME_BYTES = 60, 200
# Zero-width characters that shape their neighbours.
JOINERS = "\u200c\u200d"
# Of a run; the others are of a prompt.
MAX_VIDEOS = 100_000
MAX_CHARACTERS, MAX_REFERENCES = 20_000, 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video to sample.

    Its noise depends on ``seed``, ``place`` and ``sample`` alone, so the number of processes and
    the batches do not change the result.

    Attributes:
        size: height and width in pixels.
        index: position of the prompt in the list.
        place: ``index``, or 0 for a prompt with its own seed, whose video is then independent of
            its position.
        sample: number of the video among the videos of its prompt.
        own_name: the name of its files, without suffix; None makes one of index and prompt.
        inputs: files of the model's further inputs, by name.
        digests: SHA-256 of ``files`` by path, where they are recorded with the video.
    """

    prompt: Prompt
    num_frames: int
    size: tuple[int, int]
    fps: float
    seed: int
    negative_prompt: str | None = None
    index: int = 0
    place: int = 0
    sample: int = 0
    own_name: str | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict, hash=False)
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def files(self) -> list[Path]:
        """The files that are read for the video."""
        return [*self.prompt.references, *self.inputs.values()]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames, height and width; equal for all requests of a batch."""
        return (self.num_frames, *self.size)

    @property
    def name(self) -> str:
        """Name of its files, without suffix."""
        if self.own_name is not None:
            return self.own_name
        suffix = f"-s{self.sample}" if self.sample else ""
        return f"{self.index:03d}-{file_name(self.prompt.text)}{suffix}"

    def noise(self, shape: tuple[int, ...], purpose: str, *counters: int, loop: int) -> Tensor:
        """Standard normal numbers, float32, on the CPU."""
        # Loop and sample enter the key only where they are not 0: older versions had neither.
        if loop or self.sample:
            counters += (loop,)
        if self.sample:
            counters += (self.sample,)
        return normal(shape, self.seed, purpose, self.place, *counters)


def file_name(text: str) -> str:
    """A text as part of a file name, with letters, digits and signs of all scripts.

    Separators, control characters and ASCII punctuation become ``-``. The result is short enough
    for the 255 bytes of a file name, with number, suffix and the prefix of temporary files.
    """
    # Composed and decomposed letters are one name.
    plain = unicodedata.normalize("NFC", text).lower()
    kept = "".join(character if _is_kept(character) else "-" for character in plain)
    slug = re.sub("-+", "-", kept).strip("-")[:NAME_CHARACTERS]
    return slug.encode()[:NAME_BYTES].decode(errors="ignore")


def _is_kept(character: str) -> bool:
    if character.isascii():
        return character.isalnum()
    return unicodedata.category(character)[0] not in "ZC" or character in JOINERS


def requests_of(
    cfg: InferenceConfig, prompts: Sequence[str | PromptOptions] | None = None
) -> list[Request]:
    """The videos of a config, in the order of its prompts; samples of a prompt are neighbours.

    Args:
        prompts: instead of the config's prompts.

    Raises:
        ValueError: if the braces of a prompt are invalid (see ``parse_prompt``), or prompts, videos
            or references are too many or too large.
    """
    prompts = cfg.prompts if prompts is None else prompts
    _check_at_most(MAX_VIDEOS, len(prompts) * cfg.num_samples, "videos to sample", "run")

    requests = []
    for index, prompt in enumerate(prompts):
        options = PromptOptions(prompt=prompt) if isinstance(prompt, str) else prompt
        requests += [_request(cfg, options, index, sample) for sample in range(cfg.num_samples)]
    if cfg.file_names == "prompt":
        _check_names(requests)
    return requests


def _check_names(requests: Sequence[Request]) -> None:
    """Raise ValueError unless prompts are file names that differ, as VBench looks them up."""
    seen: set[str] = set()
    for request in requests:
        name = request.name
        # Number, suffix and the prefix of temporary files are added.
        is_name = "/" not in name and "\0" not in name and len(name.encode()) <= NAME_BYTES
        if not is_name or name in seen:
            reason = "twice" if name in seen else f"of {len(name.encode())} bytes"
            raise ValueError(
                f"got the file name {name!r} {reason} with file_names='prompt'; expected different "
                f"names without '/' of at most {NAME_BYTES} bytes; change the prompt, or set "
                "file_names='numbered'"
            )
        seen.add(name)


def _request(cfg: InferenceConfig, options: PromptOptions, index: int, sample: int) -> Request:
    def either(name: str) -> Any:
        """The prompt's own value, or else the config's."""
        option = getattr(options, name)
        return getattr(cfg, name) if option is None else option

    _check_at_most(MAX_CHARACTERS, len(options.prompt), "characters", "prompt")
    prompt = parse_prompt(options.prompt, either("reference_path"), either("mask_strategy"))
    if not prompt.text:
        raise ValueError(
            f"got the prompt {options.prompt!r}, which has no text; expected some; write what the "
            "video shows, or leave the prompt out"
        )
    own_name = f"{prompt.text}-{sample}" if cfg.file_names == "prompt" else None
    _check_at_most(MAX_REFERENCES, len(prompt.references), "references", "prompt")

    num_frames, size = either("num_frames"), options.size or cfg.size
    cfg.limits.check(f"the video {index} of the prompts", num_frames, *size)
    _check_at_most(cfg.limits.clip_frames, cfg.loop * num_frames, "frames in all loops", "video")

    return Request(
        prompt=replace(prompt, text=with_scores(cfg, prompt.text)),
        num_frames=num_frames,
        size=size,
        fps=either("fps"),
        seed=either("seed"),
        negative_prompt=either("negative_prompt"),
        index=index,
        # A prompt with its own seed has the same video wherever it stands.
        place=index if options.seed is None else 0,
        sample=sample,
        own_name=own_name,
        inputs={name: Path(path) for name, path in options.inputs.items()},
    )


def _check_at_most(allowed: int, number: int, what: str, of: str) -> None:
    if number > allowed:
        raise ValueError(
            f"got {number:,} {what} of a {of}; expected at most {allowed:,}; divide them, or ask "
            "for fewer"
        )


def batches_of(
    requests: Sequence[Request], batch_size: int, groups: int = 1
) -> list[list[Request]]:
    """Batches of requests of one shape and of the same edits, at most ``batch_size`` each.

    Batches are smaller where that gives work to more ``groups``.
    """
    by_kind: dict[Any, list[Request]] = {}
    for request in requests:
        # Edits end cached steps; a video's own ones alone, whatever it is batched with.
        edits = frozenset((part.loop, part.edit) for part in request.prompt.insertions)
        by_kind.setdefault((request.shape, edits), []).append(request)

    batches = []
    for same_kind in by_kind.values():
        size = min(batch_size, math.ceil(len(same_kind) / groups))
        batches += [same_kind[i : i + size] for i in range(0, len(same_kind), size)]
    return batches


def check_requests(cfg: InferenceConfig, requests: Sequence[Request]) -> None:
    """Check that requests can be sampled; of references only the headers are read.

    Logs a warning for each reference of another size than the video.

    Raises:
        ValueError: for a size, loop, prompt or reference that does not fit.
    """
    # Each file is read once, and each warning is logged once.
    probe_once, warn_once = functools.cache(probe_reference), functools.cache(_warn_of_size)
    # A part that loops share may have any length, also one that the statistics do not fit.
    vae = cfg.vae | ({"normalization": None} if "normalization" in cfg.vae else {})
    latent_size = functools.partial(planned_latent_size, vae)

    for request in requests:
        frames = latent_frames(cfg, request)
        steps_of_video(cfg, request.shape)  # raises for an interval without steps
        starts = [0] if cfg.extra_files is None else first_frames(cfg, request, latent_size)
        for start in starts:
            extra_inputs(cfg, request, start)
        prompt_of_loop(request.prompt.text, cfg.loop - 1)  # raises for malformed prompts
        _check_even(cfg, request)
        if cfg.loop > 1 and cfg.condition_frame_length >= frames:
            raise ValueError(
                f"got loop {cfg.loop} with condition_frame_length {cfg.condition_frame_length}; "
                f"expected fewer than the {frames} latent frames of a part, so that some are new; "
                "lower it or raise num_frames"
            )

        counts = []
        for path in request.prompt.references:
            probed = probe_once(path, cfg.limits)
            warn_once(path, (probed.height, probed.width), request.size)
            kept = planned_whole_frames(cfg.vae, probed.num_frames)
            counts.append(planned_latent_size(cfg.vae, kept, *request.size)[0])
        if cfg.cond_type is not None:
            _check_condition(cfg.cond_type, request.prompt)
            continue
        check_insertions(request.prompt.insertions, counts, frames=frames, loops=cfg.loop)


def steps_of_video(cfg: InferenceConfig, shape: tuple[int, int, int]) -> list[SamplingStep]:
    """The sampling steps of a video of so many frames and (height, width).

    Raises:
        ValueError: if the guidance interval holds no step.
    """
    process = build_component(cfg.scheduler, SCHEDULERS)
    latent_frames, *_ = planned_latent_size(cfg.vae, *shape)
    return sampling_steps(process, shape, latent_frames)


def _check_even(cfg: InferenceConfig, request: Request) -> None:
    """Raise ValueError for a size that the video's file cannot have."""
    is_h264 = cfg.format == "mp4" and (request.num_frames > 1 or cfg.loop > 1)
    # Some of Open-Sora's named sizes are odd, and lose a line there as well.
    is_named = any(request.size in sizes.values() for sizes in SIZES.values())
    if is_h264 and not is_named and any(side % 2 for side in request.size):
        even = "x".join(str(side // 2 * 2) for side in request.size)
        raise ValueError(
            f"got frames of {request.size[0]}x{request.size[1]} pixels for "
            f"{request.prompt.text!r}; expected even sides, the only ones of H.264 in mp4; take "
            f"{even}, or format='gif'"
        )


def latent_frames(cfg: InferenceConfig, request: Request) -> int:
    """Latent frames of one loop of a video.

    Raises:
        ValueError: if the model has position tables for another size, or the autoencoder does not
            give back as many frames.
    """
    latent_size = planned_latent_size(cfg.vae, *request.shape)
    decoded = planned_decoded_frames(cfg.vae, request.num_frames)
    if decoded != request.num_frames:
        counts = range(request.num_frames, 0, -1)
        advised = next((n for n in counts if planned_decoded_frames(cfg.vae, n) == n), 1)
        raise ValueError(
            f"got {request.num_frames} frames for {request.prompt.text!r}, of which the vae "
            f"{cfg.vae['type']!r} gives back {decoded}; expected a count that comes back; "
            f"set num_frames={advised}"
        )

    wanted = cfg.model_spec.input_size
    if wanted is not None and wanted != latent_size:
        raise ValueError(
            f"got {request.num_frames} frames of {request.size[0]}x{request.size[1]} pixels, "
            f"latents of {latent_size}, for {request.prompt.text!r}; expected the model's "
            f"input_size {wanted}; change the size, or take a checkpoint of that size"
        )
    return latent_size[0]


def _check_condition(kind: str, prompt: Prompt) -> None:
    """Raise ValueError if a prompt does not fit the kind of conditioning frames."""
    if not prompt.references or prompt.mask_strategy is not None:
        raise ValueError(
            f"got cond_type {kind!r} with {len(prompt.references)} references and mask_strategy "
            f"{prompt.mask_strategy!r} for {prompt.text!r}; expected at least one reference and no "
            "mask_strategy, since the kind places its frames; pass reference_path, or set "
            "cond_type=None"
        )


def _warn_of_size(path: Path, size: tuple[int, int], wanted: tuple[int, int]) -> None:
    if size != wanted:
        logger.warning(
            "reference %s of %dx%d pixels is resized and cropped to %dx%d", path, *size, *wanted
        )


def probe_reference(path: Path, limits: Limits) -> Probed:
    """Size and length of an image or a video.

    Raises:
        ValueError: if it is not a file, cannot be decoded, or is larger than the limits.
    """
    if not path.is_file():
        raise ValueError(
            f"got reference {str(path)!r}, which is not a file; expected an image or a video; "
            "check it"
        )
    try:
        probed = probe(path, limits)
        limits.check("frames", probed.num_frames, probed.height, probed.width)
        return probed
    except UNREADABLE as error:
        raise ValueError(
            f"got reference {str(path)!r}, which cannot be decoded ({error or 'no frames'}); "
            "expected an image or a video; check the file"
        ) from None


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
            f"{names}, which the model {cfg.model_spec.name!r} takes with the prompt; set inputs "
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
                "inputs that begin with 'frames' or have no time, since inputs of latent "
                "frames belong to one loop; set loop=1"
            )
