"""Fields of the page, the job that they fill, errors in their words, placed references."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.diffusion.cached_steps import SamplingOptions
from opensora_sp.encoders import planned_latent_size, planned_whole_frames
from opensora_sp.sampling.reference_frames import insert_references
from opensora_sp.sampling.requests import Request, probe_reference

# Config key -> label and example.
FIELDS = {
    "ckpt": ("Checkpoint", ""),
    "prompt": ("Prompt", "a red circle moving left on a white background"),
    "negative_prompt": ("Negative prompt", "what the video should not show"),
    "resolution": ("Size", "e.g. 128x192"),
    "aspect_ratio": ("Aspect ratio", "e.g. 9:16"),
    "num_frames": ("Frames", "e.g. 16 or 2s"),
    "fps": ("FPS", "e.g. 24"),
    "scheduler.num_sampling_steps": ("Steps", "e.g. 30"),
    "scheduler.cfg_scale": ("Guidance", "e.g. 7.0"),
    "scheduler.guidance_interval": ("Guidance interval", "e.g. 0.1, 0.9"),
    "scheduler.cache_threshold": ("Cache threshold", "e.g. 0.1"),
    "seed": ("Seed", "random"),
    "reference_path": ("References", ""),
    "mask_strategy": ("Frames that references set", ""),
    "lora": ("LoRA: PATH or PATH:SCALE", ""),
}
LISTS = ("reference_path", "mask_strategy")  # joined by ";"
# What references set most often; see ``sampling.reference_frames``.
PLACES = [
    ("reference 1 is the first frame", "0,0"),
    ("reference 1 is the last frame", "0,0,0,-1"),
    ("reference 2 is the first frame", "0,1"),
    ("reference 2 is the last frame", "0,1,0,-1"),
    ("reference 1 is the first frame, half regenerated", "0,0,0,0,1,0.5"),
]


@dataclass(frozen=True)
class Work:
    """A filled form: one request, with the config and the weights that ``preflight`` has checked.

    Attributes:
        versions: of the files of weights and adapters, which a training may replace.
    """

    cfg: InferenceConfig
    request: Request
    weights: Path
    versions: str


@dataclass(eq=False)
class Job:
    """One video to sample, and what has become of it.

    Attributes:
        values: see ``Queue.check``, which makes ``work`` of them.
    """

    values: Mapping[str, Any]
    work: Work | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: Literal["waiting", "running", "done", "cancelled", "failed"] = "waiting"
    steps: tuple[int, int] = (0, 0)  # done, of all
    began: float = 0.0  # when the first step had been done, by time.monotonic()
    preview: bytes = b""  # PNG
    video: Path | None = None
    error: str = ""
    refused_field: str = ""  # its key

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")

    @property
    def seconds_left(self) -> float | None:
        """Of the steps that are left; None before two of them are done."""
        done, total = self.steps
        if done < 2:
            return None
        return (time.monotonic() - self.began) / (done - 1) * (total - done)

    def cancel(self) -> None:
        """At any time: while it is checked, waits or runs, or for nothing once it has ended."""
        self.cancelled.set()
        if self.state == "waiting":
            self.state = "cancelled"


def settings_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields hold for a video with this metadata (see ``facts_of``)."""
    process: Any = build_component(facts["config"]["scheduler"], SCHEDULERS)
    settings: dict[str, Any] = dict.fromkeys(FIELDS, "")
    settings |= {key: facts[key] for key in FIELDS.keys() & facts}
    settings["resolution"] = "x".join(map(str, facts["image_size"]))
    settings["scheduler.num_sampling_steps"] = process.num_sampling_steps
    settings |= {"scheduler.cfg_scale": f"{process.cfg_scale:g}", "fps": f"{facts['fps']:g}"}
    if isinstance(process, SamplingOptions):
        low, high = process.guidance_interval
        settings["scheduler.guidance_interval"] = f"{low:g}, {high:g}"
        settings["scheduler.cache_threshold"] = f"{process.cache_threshold:g}"
    for key, setting in settings.items():
        settings[key] = "" if setting is None else str(setting)
    for key in LISTS:
        settings[key] = [part for part in settings[key].split(";") if part]
    return settings | {"lora": facts.get("lora", [])}


def refused_field(values: Mapping[str, Any], check: Callable[[Mapping[str, Any]], object]) -> str:
    """The key of the first field that a request is refused for; empty where it is none.

    Args:
        check: raises ValueError or OSError for what is refused.
    """
    tried: dict[str, Any] = {"prompt": "any"}
    for key in FIELDS:
        tried[key] = values.get(key)
        try:
            check(tried)
        except (ValueError, OSError):
            return key
    return ""


def worded(error: Exception) -> str:
    """An error with labels in place of config keys, and without the path of the config."""
    text = re.sub(r"^in \S+:\s+|scheduler\.| \[(--[\w-]+|\S+\.py:\d+)\]", "", str(error))
    for key, (label, _) in FIELDS.items():
        name, label = key.removeprefix("scheduler."), label.partition(":")[0]
        if name != label.lower():
            text = re.sub(rf"(?<![\w./]){name}(?![\w/])", label, text)
    return text


def placed_frames(work: Work) -> list[list[tuple[int, float]]]:
    """For each part of a video, of each latent frame: its reference, from 0, and its ``edit``.

    -1 is no reference, or the part before.
    """
    cfg, request, prompt = work.cfg, work.request, work.request.prompt
    frames, *_ = planned_latent_size(cfg.vae, *request.shape)
    references = []
    for number, path in enumerate(prompt.references):
        whole = planned_whole_frames(cfg.vae, probe_reference(path, cfg.limits).num_frames)
        count, *_ = planned_latent_size(cfg.vae, whole, *request.size)
        references.append(torch.full((1, count, 1, 1), float(number)))

    # As ``Pipeline`` does, by the chunks of its autoencoder.
    is_chunked = cfg.vae["type"] == "OpenSoraVAE_V1_2"
    chunk = cfg.vae.get("micro_frame_size", 17) if is_chunked else None
    align = chunk and planned_latent_size(cfg.vae, chunk, *request.size)[0]
    parts = []
    empty = torch.full((1, frames, 1, 1), -1.0)
    for loop in range(cfg.loop):
        # From the second part on, the part before is one more reference.
        known = [*references, empty] if loop else references
        latent, edits = insert_references(empty, known, prompt.insertions, loop=loop, align=align)
        numbers = latent.flatten().int().tolist()
        parts.append(list(zip(numbers, edits.tolist(), strict=True)))
    return parts
