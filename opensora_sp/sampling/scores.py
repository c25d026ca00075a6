"""Scores in a prompt: aesthetics, motion and camera, worded as in training Open-Sora 1.2 or 1.3."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

from opensora_sp.config import InferenceConfig

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
Sentences = Mapping[str, str | None]
"""By the phrase that a prompt may have itself: a sentence, None for none."""


def with_scores(cfg: InferenceConfig, prompt: str) -> str:
    """Append the config's scores to the text of each loop of a prompt.

    They are written as in training Open-Sora 1.2 or, with ``score_style`` "words", 1.3.
    A score that the prompt states itself is kept.
    """
    sentences = _in_words(cfg) if cfg.score_style == "words" else _in_numbers(cfg)
    scored = functools.partial(_with_sentences, sentences=sentences)

    if not prompt.startswith("|"):
        return scored(prompt)

    # "|0|a cat|2|a dog" -> "", "|0|", "a cat", "|2|", "a dog"
    empty, *parts = re.split(r"(\|\s*\d+\s*\|)", prompt)
    texts = [part if i % 2 == 0 else scored(part.strip()) for i, part in enumerate(parts)]
    return "".join([empty, *texts])


def _in_words(cfg: InferenceConfig) -> Sentences:
    aesthetic, motion = _graded(cfg.aes, AESTHETIC_WORDS), _graded(cfg.flow, MOTION_WORDS)
    camera = cfg.camera_motion
    return {
        "aesthetic score is": aesthetic and f"The aesthetic score is {aesthetic}",
        "motion strength is": motion and f"The motion strength is {motion}",
        "camera motion:": camera and f"camera motion: {camera}",
    }


def _in_numbers(cfg: InferenceConfig) -> Sentences:
    values = {
        "aesthetic score:": None if cfg.aes is None else f"{float(cfg.aes):.1f}",
        "motion score:": None if cfg.flow is None else f"{float(cfg.flow):.1f}",
        "camera motion:": cfg.camera_motion,
    }
    return {name: None if score is None else f"{name} {score}" for name, score in values.items()}


def _with_sentences(text: str, sentences: Sentences) -> str:
    """The text with those sentences at the end whose phrase it does not have."""
    for phrase, sentence in sentences.items():
        if sentence is not None and phrase not in text:
            text += f" {sentence}."
    return text


def _graded(score: float | str | None, words: dict[float, str]) -> str | None:
    """The word of the highest bound that a score reaches; texts that are no numbers stay."""
    if score is None:
        return None
    try:
        reached = [word for bound, word in words.items() if float(score) >= bound]
    except ValueError:
        return str(score)
    return reached[-1]
