"""What is asked for: one request for each video, and the batches that they are sampled in."""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from opensora_sp.config import InferenceConfig, PromptOptions
from opensora_sp.data.video import UNREADABLE, Probed, probe
from opensora_sp.encoders import planned_latent_size
from opensora_sp.randomness import normal

from .conditioning import Prompt, check_insertions, parse_prompt, prompt_of_loop
from .lettering import JOINERS

logger = logging.getLogger(__name__)
NAME_CHARACTERS, NAME_BYTES = 60, 200


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video to sample.

    Its noise depends on ``seed``, ``place`` and ``sample`` alone, so the number of processes and
    the batches do not change what is sampled. ``place`` is that of its prompt in the list, or 0
    where the prompt has a seed of its own: then it gives the same video wherever it stands.
    """

    prompt: Prompt
    num_frames: int
    size: tuple[int, int]  # height and width in pixels
    fps: float
    seed: int
    negative_prompt: str | None = None
    index: int = 0  # of its prompt in the list
    place: int = 0
    sample: int = 0  # which of the samples of the prompt

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames, height and width; what requests of one batch have in common."""
        return (self.num_frames, *self.size)

    @property
    def name(self) -> str:
        """Of its files, without suffix."""
        slug = file_name(self.prompt.text)
        return f"{self.index:03d}-{slug}" + (f"-s{self.sample}" if self.sample else "")

    def noise(self, shape: tuple[int, ...], purpose: str, *counters: int, loop: int) -> Tensor:
        """Standard normal numbers, float32, on the CPU."""
        of_sample = (loop, self.sample) if self.sample else (loop,) if loop else ()
        return normal(shape, self.seed, purpose, self.place, *counters, *of_sample)


def file_name(text: str) -> str:
    """A text as part of a file's name: letters, digits and signs of all scripts stay.

    Separators, control characters and the punctuation of ASCII become ``-``. File systems take 255
    bytes, of which number, ending and the name while the file is written need some.
    """
    plain = unicodedata.normalize("NFC", text).lower()
    kept = "".join(one if _stays(one) else "-" for one in plain)
    slug = re.sub("-+", "-", kept).strip("-")[:NAME_CHARACTERS]
    return slug.encode()[:NAME_BYTES].decode(errors="ignore")


def _stays(character: str) -> bool:
    if character.isascii():
        return character.isalnum()
    return unicodedata.category(character)[0] not in "ZC" or character in JOINERS


def requests_of(
    cfg: InferenceConfig, prompts: Sequence[str | PromptOptions] | None = None
) -> list[Request]:
    """The videos that a config asks for, in the order of its prompts (or of others); samples of a
    prompt in a row.

    Raises:
        ValueError: if a prompt's braces hold something else than they may; see ``parse_prompt``.
    """
    given = [
        PromptOptions(prompt=p) if isinstance(p, str) else p
        for p in (cfg.prompts if prompts is None else prompts)
    ]
    return [
        _request(cfg, one, index, sample)
        for index, one in enumerate(given)
        for sample in range(cfg.num_samples)
    ]


def _request(cfg: InferenceConfig, said: PromptOptions, index: int, sample: int) -> Request:
    def either(name: str) -> Any:
        return getattr(cfg, name) if getattr(said, name) is None else getattr(said, name)

    return Request(
        prompt=with_scores(
            cfg, parse_prompt(said.prompt, either("reference_path"), either("mask_strategy"))
        ),
        num_frames=either("num_frames"),
        size=said.size or cfg.size,
        fps=either("fps"),
        seed=either("seed"),
        negative_prompt=either("negative_prompt"),
        index=index,
        place=index if said.seed is None else 0,
        sample=sample,
    )


def with_scores(cfg: InferenceConfig, prompt: Prompt) -> Prompt:
    """A prompt that ends, for each of its loops, in the scores of the config, worded as Open-Sora
    1.2 was trained.

    What a prompt says itself stays.
    """
    aes, flow = (None if score is None else f"{score:.1f}" for score in (cfg.aes, cfg.flow))
    scores = {"aesthetic score:": aes, "motion score:": flow, "camera motion:": cfg.camera_motion}

    def ended(text: str) -> str:
        said = [
            f"{name} {value}."
            for name, value in scores.items()
            if value is not None and name not in text
        ]
        return " ".join([text, *said])

    if not prompt.text.startswith("|"):
        return replace(prompt, text=ended(prompt.text))
    empty, *parts = re.split(r"(\|\s*\d+\s*\|)", prompt.text)  # "", "|0|", text, "|2|", text
    texts = [part if i % 2 == 0 else ended(part.strip()) for i, part in enumerate(parts)]
    return replace(prompt, text="".join([empty, *texts]))


def batches_of(
    requests: Sequence[Request], batch_size: int, groups: int = 1
) -> list[list[Request]]:
    """Requests of one shape side by side, at most ``batch_size``, and fewer where more groups would
    find work.
    """
    by_shape: dict[tuple[int, int, int], list[Request]] = {}
    for request in requests:
        by_shape.setdefault(request.shape, []).append(request)
    batches = []
    for alike in by_shape.values():
        size = min(batch_size, -(-len(alike) // groups))
        batches += [alike[i : i + size] for i in range(0, len(alike), size)]
    return batches


def check_requests(cfg: InferenceConfig, requests: Sequence[Request]) -> None:
    """Raise ValueError for what cannot be sampled; nothing but headers of references is read.

    References of another size than the video are told, once each.
    """
    seen, tell = functools.cache(probe_reference), functools.cache(_tell_size)  # each file once
    for request in requests:
        frames = latent_frames(cfg, request)
        prompt_of_loop(request.prompt.text, cfg.loop - 1)
        if cfg.loop > 1 and cfg.condition_frame_length >= frames:
            raise ValueError(
                f"got loop {cfg.loop} with condition_frame_length {cfg.condition_frame_length}; "
                f"expected fewer than the {frames} latent frames of a part, so that some are new; "
                "lower it or raise num_frames"
            )
        counts = []
        for path in request.prompt.references:
            found = seen(path)
            tell(path, (found.height, found.width), request.size)
            counts.append(planned_latent_size(cfg.vae, found.num_frames, *request.size)[0])
        check_insertions(request.prompt.insertions, counts, frames=frames, loops=cfg.loop)


def latent_frames(cfg: InferenceConfig, request: Request) -> int:
    """Latent frames of a part of a video.

    Raises:
        ValueError: if the model has position tables for another size.
    """
    latent_size = planned_latent_size(cfg.vae, *request.shape)
    wanted = cfg.model_spec.input_size
    if wanted is not None and wanted != latent_size:
        raise ValueError(
            f"got {request.num_frames} frames of {request.size[0]}x{request.size[1]} pixels, "
            f"latents of {latent_size}, for {request.prompt.text!r}; expected the model's "
            f"input_size {wanted}; change the size, or take a checkpoint of that size"
        )
    return latent_size[0]


def _tell_size(path: Path, found: tuple[int, int], wanted: tuple[int, int]) -> None:
    if found != wanted:
        logger.warning(
            "reference %s of %dx%d pixels is resized and cropped to %dx%d", path, *found, *wanted
        )


def probe_reference(path: Path) -> Probed:
    """What an image or a video holds.

    Raises:
        ValueError: if it is no file, or cannot be decoded.
    """
    if not path.is_file():
        raise ValueError(
            f"got reference {str(path)!r}, which is not a file; expected an image or a video; "
            "check it"
        )
    try:
        return probe(path)
    except UNREADABLE as error:
        raise ValueError(
            f"got reference {str(path)!r}, which cannot be decoded ({error or 'no frames'}); "
            "expected an image or a video; check the file"
        ) from None
