"""Captions as Open-Sora 1.3 words them: scores at the end, and no beginning of captioning models.

Its sampler has the sentences, its tools for data the draws and the full stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .randomness import generator

# Scores in words, by their lower bounds.
AESTHETIC_WORDS = {
    -math.inf: "terrible",
    4: "very poor",
    4.5: "poor",
    5: "fair",
    5.5: "good",
    6: "very good",
    6.5: "excellent",
}
MOTION_WORDS = {
    -math.inf: "very low",
    0.5: "low",
    2: "fair",
    5: "high",
    10: "very high",
    20: "extremely high",
}
CAMERA_MOTIONS = (
    "static",
    "pan left",
    "pan right",
    "tilt up",
    "tilt down",
    "zoom in",
    "zoom out",
)
# What its detector returns where it is not sure; no caption has them.
OTHER_MOTIONS = ("", "dynamic", "unknown", "pan/tilt")
VERBS = ("shows", "captures", "features", "depicts", "presents", "is")
PREFIXES = (
    *(f"The video {verb} " for verb in VERBS),
    "In the video, ",
    *(f"The image {verb} " for verb in (*VERBS, "portrays")),
    "In the image, ",
)
SCORES = ("aes", "flow")
CAMERA = "cmotion"
# Probability of leaving a score out, so that a model also learns from captions without.
DROP = 0.2
# Of the draws: what a caption says belongs to its manifest, whatever the seed of a run is.
SEED = 42

Sentences = Mapping[str, str | None]
"""By the phrase that a text may have itself: a sentence without its full stop, None for none."""


@dataclass(frozen=True)
class Captions:
    """Changes of a manifest's captions as they are read.

    Attributes:
        with_scores: append what the columns ``aes``, ``flow`` and ``cmotion`` have. Of each clip
            and score it is drawn once whether it is left out.
        without_prefix: remove a beginning in ``PREFIXES``.
    """

    with_scores: bool = False
    without_prefix: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The further columns that are read."""
        return (*SCORES, CAMERA) if self.with_scores else ()

    def change(
        self, texts: Sequence[str], scores: Mapping[str, np.ndarray], motions: Sequence[str]
    ) -> list[str]:
        """The captions of all lines.

        Args:
            scores: ``aes`` and ``flow``, float64 ``[len(texts)]``, NaN where it is not known.
            motions: camera motions, "" where it is not known.
        """
        captions = [without_prefix(text) if self.without_prefix else text for text in texts]
        if not self.with_scores:
            return captions

        # By line and not by epoch: a clip has one caption, which a feature cache keeps.
        drawn = generator(SEED, "caption_scores").random((len(captions), len(SCORES)))
        for line, text in enumerate(captions):
            known = {}
            for name, number in zip(SCORES, drawn[line], strict=True):
                score = scores[name][line]
                known[name] = None if math.isnan(score) or number < DROP else float(score)
            text = text.rstrip()
            # The sentences follow the caption.
            if text and not text.endswith("."):
                text += "."
            sentences = score_words(**known, camera=motions[line] or None)
            captions[line] = with_sentences(text, sentences).lstrip()
        return captions


def score_words(
    aes: float | str | None, flow: float | str | None, camera: str | None
) -> dict[str, str | None]:
    """The sentences of Open-Sora 1.3 on the aesthetic score, the motion score and the camera."""
    aesthetic, motion = _graded(aes, AESTHETIC_WORDS), _graded(flow, MOTION_WORDS)
    return {
        "aesthetic score is": aesthetic and f"The aesthetic score is {aesthetic}",
        "motion strength is": motion and f"The motion strength is {motion}",
        "camera motion:": camera and f"camera motion: {camera}",
    }


def with_sentences(text: str, sentences: Sentences) -> str:
    """The text with those sentences at the end whose phrase it does not have."""
    for phrase, sentence in sentences.items():
        if sentence is not None and phrase not in text:
            text += f" {sentence}."
    return text


def without_prefix(caption: str) -> str:
    """The caption without a beginning such as "The video shows ", with a capital letter."""
    for prefix in PREFIXES:
        rest = caption[len(prefix) :].strip()
        if rest and caption.startswith((prefix, prefix.lower())):
            return rest[0].upper() + rest[1:]
    return caption


def camera_motion(cell: Any) -> str | None:
    """A camera motion as captions have it, "" where they have none, None for anything else."""
    name = str(cell or "").strip().lower().replace("_", " ")
    if name in OTHER_MOTIONS:
        return ""
    return name if name in CAMERA_MOTIONS else None


def _graded(score: float | str | None, words: dict[float, str]) -> str | None:
    """The word of the highest bound that a score reaches; texts that are no numbers stay."""
    if score is None:
        return None
    try:
        reached = [word for bound, word in words.items() if float(score) >= bound]
    except ValueError:
        return str(score)
    return reached[-1]
