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

    sp_size: int | None = Field(None, ge=1)  # type: ignore[assignment]
    """Ranks that share each batch; None chooses the fastest by estimate."""

    precision: Precision = "bf16"
    """Data type of the model's computation."""

    fps: float = Field(24.0, gt=0)
    """Frames per second, also an input of the model."""

    save_fps: float | None = Field(None, gt=0)
    """Frames per second of the files; None is `fps`."""

    batch_size: int = Field(1, ge=1)
    """Largest number of videos in a batch."""

    ckpt: str | None = None
    """Weights: a run, a checkpoint, a Hugging Face folder or a file."""

    use_ema: bool = True
    """Load the EMA weights of a checkpoint."""

    prompts: Prompts = []
    """Prompts: texts, or dicts of the options of one prompt."""

    prompt_path: str | None = None
    """.txt or .csv file of prompts, if `prompts` is empty."""

    aes: float | None = None
    """Aesthetic score appended to prompts, as in the release's training; None appends none."""

    flow: float | None = None
    """Motion score appended to prompts; None appends none."""

    camera_motion: str | None = None
    """Camera motion appended to prompts; None appends none."""

    num_samples: int = Field(1, ge=1)
    """Videos per prompt."""

    skip_existing: bool = False
    """Skip videos that exist already from the same request."""

    format: Literal["mp4", "gif"] = "mp4"
    """File format of videos; single frames are PNG."""

    file_names: Literal["numbered", "prompt"] = "numbered"
    """Names of the videos: position and prompt (`000-a-cat.mp4`, `000-a-cat-s1.mp4`), or as VBench
    expects them, the prompt itself and the sample (`a cat-0.mp4`), in a folder of videos alone.
    """

    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; None is no caption."""

    reference_path: str | None = None
    """Conditioning images and videos, separated by `;`; None is no conditioning."""

    mask_strategy: str | None = None
    """Placement of the conditioning frames; see docs/sampling.md."""

    loop: int = Field(1, ge=1)
    """Parts of a video, each continuing the one before."""

    condition_frame_length: int = Field(5, ge=1)
    """Latent frames that a part takes from the part before."""

    condition_frame_edit: float = Field(0.0, ge=0, le=1)
    """Share of the noise schedule in which these frames are generated again."""

    outputs: str = "samples"
    """Folder of the samples."""
