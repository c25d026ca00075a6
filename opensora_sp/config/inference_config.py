"""The config keys of sampling runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from opensora_sp.data.buckets import BatchSpec

from .common import Common
from .sections import Fps, Precision, Prompts


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

    fps: Fps = 24.0
    """Frames per second, also an input of the model."""

    save_fps: Fps | None = None
    """Frames per second of the files; None is `fps`."""

    batch_size: int = Field(1, ge=1)
    """Largest number of videos in a batch."""

    ckpt: str | None = None
    """Weights: a run, a checkpoint, a folder, a file, or a name on the hub, with `@revision`."""

    lora: tuple[str, ...] = ()
    """LoRA adapters to merge into the weights, each `PATH` or `PATH:SCALE`; see docs/lora.md."""

    use_ema: bool = True
    """Load the EMA weights of a checkpoint."""

    prompts: Prompts = []
    """Prompts: texts, or dicts of the options of one prompt."""

    prompt_path: str | None = None
    """.txt or .csv file of prompts, if `prompts` is empty."""

    aes: float | str | None = None
    """Aesthetic score appended to prompts, as in the release's training; None appends none."""

    flow: float | str | None = None
    """Motion score appended to prompts; None appends none."""

    score_style: Literal["numbers", "words"] = "numbers"
    """Wording of the scores: numbers as in Open-Sora 1.2, or words as in 1.3."""

    camera_motion: str | None = None
    """Camera motion appended to prompts; None appends none."""

    num_samples: int = Field(1, ge=1)
    """Videos per prompt."""

    skip_existing: bool = False
    """Skip videos that exist already from the same request and the same files."""

    format: Literal["mp4", "gif"] = "mp4"
    """File format of videos; single frames are PNG."""

    file_names: Literal["numbered", "prompt"] = "numbered"
    """Names of the videos: position and prompt (`000-a-cat.mp4`, `000-a-cat-s1.mp4`), or as VBench
    expects them, the prompt itself and the sample (`a cat-0.mp4`), in a folder of videos alone."""

    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; None is no caption."""

    reference_path: str | None = None
    """Conditioning images and videos, separated by `;`; None is no conditioning."""

    mask_strategy: str | None = None
    """Placement of the conditioning frames; see docs/sampling.md."""

    cond_type: Literal["i2v_head", "i2v_tail", "i2v_loop", "v2v_head"] | None = None
    """Conditioning frames as in Open-Sora 1.3, of a model with `use_cond`; see docs/sampling.md."""

    loop: int = Field(1, ge=1)
    """Parts of a video, each continuing the one before."""

    condition_frame_length: int = Field(5, ge=1)
    """Latent frames that a part takes from the part before."""

    condition_frame_edit: float = Field(0.0, ge=0, le=1)
    """Share of the noise schedule in which these frames are generated again."""

    outputs: str = "samples"
    """Folder of the samples."""

    def batches(self) -> dict[str, BatchSpec]:
        """The batches that are sampled, by their size."""
        return self._batches_of_one_size(self.batch_size)

    def _rules(self) -> Iterator[Callable[[], object]]:
        yield from super()._rules()
        yield self._scores_have_numbers
        yield self._condition_fits

    def _scores_have_numbers(self) -> None:
        for name in ("aes", "flow"):
            score = getattr(self, name)
            if self.score_style == "words" or not isinstance(score, str):
                continue
            try:
                float(score)
            except ValueError:
                raise ValueError(
                    f"got {name} = {score!r} with score_style 'numbers'; expected a number; write "
                    "one, or set score_style='words'"
                ) from None

    def _condition_fits(self) -> None:
        if self.cond_type is not None:
            self._check_conditioned(f"cond_type {self.cond_type!r}", "batch_size", 1)
