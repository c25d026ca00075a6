"""The config keys of sampling runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .common import Common
from .sections import (
    Precision,
    Prompts,
)


class InferenceConfig(Common):
    """A sampling run. If ``sp_size`` is None, it is chosen by estimated time.

    ``prompts`` are texts, or dicts of ``PromptOptions``. ``num_samples`` videos are sampled for
    each, from different noise. Videos are written as ``format``, single frames as PNG.

    ``reference_path`` and ``mask_strategy`` are the conditioning frames of prompts without their
    own. A ``loop`` after the first starts with the last ``condition_frame_length`` latent frames of
    the one before. These are generated again in the last ``condition_frame_edit`` of the schedule.
    """

    sp_size: int | None = Field(  # type: ignore[assignment]
        None,
        ge=1,
        description="Ranks that share each batch; None chooses the fastest by estimate.",
    )
    precision: Precision = Field("bf16", description="Data type of the model's computation.")
    fps: float = Field(24.0, gt=0, description="Frames per second, also an input of the model.")
    save_fps: float | None = Field(
        None, gt=0, description="Frames per second of the files; None is `fps`."
    )
    batch_size: int = Field(1, ge=1, description="Largest number of videos in a batch.")
    ckpt: str | None = Field(
        None, description="Weights: a run, a checkpoint, a Hugging Face folder or a file."
    )
    use_ema: bool = Field(True, description="Load the EMA weights of a checkpoint.")
    prompts: Prompts = Field(
        default_factory=list, description="Prompts: texts, or dicts of the options of one prompt."
    )
    prompt_path: str | None = Field(
        None, description=".txt or .csv file of prompts, if `prompts` is empty."
    )
    aes: float | None = Field(
        None,
        description="Aesthetic score appended to prompts, as in the release's training; None "
        "appends none.",
    )
    flow: float | None = Field(
        None, description="Motion score appended to prompts; None appends none."
    )
    camera_motion: str | None = Field(
        None, description="Camera motion appended to prompts; None appends none."
    )
    num_samples: int = Field(1, ge=1, description="Videos per prompt.")
    skip_existing: bool = Field(
        False, description="Skip videos that exist already from the same request."
    )
    format: Literal["mp4", "gif"] = Field(
        "mp4", description="File format of videos; single frames are PNG."
    )
    negative_prompt: str | None = Field(
        None, description="Negative prompt of classifier-free guidance; None is no caption."
    )
    reference_path: str | None = Field(
        None,
        description="Conditioning images and videos, separated by `;`; None is no conditioning.",
    )
    mask_strategy: str | None = Field(
        None, description="Placement of the conditioning frames; see docs/sampling.md."
    )
    loop: int = Field(1, ge=1, description="Parts of a video, each continuing the one before.")
    condition_frame_length: int = Field(
        5, ge=1, description="Latent frames that a part takes from the part before."
    )
    condition_frame_edit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the noise schedule in which these frames are generated again.",
    )
    outputs: str = Field("samples", description="Folder of the samples.")
