"""Settings that have no effect beside the others of a config.

They contradict nothing, so a run starts, and its log has a line for each. Settings that cannot be
given are errors (``TrainConfig``, ``InferenceConfig``, ``launch.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from .inference_config import InferenceConfig
from .sections import SequenceParallel
from .train_config import TrainConfig

# ``parallelize`` itself reports ``verify``, which programs set as well.
OF_SHARED_BATCHES = tuple(
    f"sequence_parallel.{name}" for name in SequenceParallel.model_fields if name != "verify"
)
OF_RECOMPUTATION = ("sequence_parallel.recompute_communication",)
OF_BACKWARD = (*OF_RECOMPUTATION, "sequence_parallel.overlap_backward")
OF_VALIDATION_VIDEOS = tuple(
    f"validation.{name}"
    for name in (
        "negative_prompt",
        "num_samples",
        "num_sampling_steps",
        "cfg_scale",
        "fps",
        "format",
    )
)


@dataclass(frozen=True)
class _Unused:
    """Keys of which none has an effect, and why."""

    keys: tuple[str, ...]
    reason: str


def unused_settings(cfg: TrainConfig | InferenceConfig, ranks: int) -> list[str]:
    """A line for each setting without effect, with the reason.

    Values that are the default do not count: the ``config.py`` of a run sets all keys.

    Args:
        ranks: the most that share a batch.
    """
    rules = [*_of_training(cfg)] if isinstance(cfg, TrainConfig) else [*_of_sampling(cfg)]
    if ranks == 1:
        rules.insert(0, _Unused(OF_SHARED_BATCHES, "no ranks share a batch"))

    lines: dict[str, str] = {}
    for rule in rules:
        for key in rule.keys:
            if key not in lines and _is_set(cfg, key):
                lines[key] = f"{key}={_value(cfg, key)!r} has no effect: {rule.reason}"
    return list(lines.values())


def _of_training(cfg: TrainConfig) -> Iterator[_Unused]:
    if not cfg.grad_checkpoint:
        yield _Unused(OF_RECOMPUTATION, "nothing is recomputed (grad_checkpoint=False)")
    if cfg.bucket_config is None:
        yield _Unused(("batch_order",), "without bucket_config all micro-batches are alike")
    if cfg.accumulates_locally:
        reason = "ranks sum their gradients locally, and keep their shards at both stages"
        yield _Unused(("zero_stage",), reason)
    if cfg.keep_last is None:
        yield _Unused(("keep_every",), "keep_last is None, so all checkpoints are kept")
    if not cfg.noise_augmentation:
        yield _Unused(("noise_prob", "noise_strength"), "noise_augmentation is False")
    if cfg.load is None:
        yield _Unused(("convert",), "load is None, so there are no weights to convert")

    validation = cfg.validation
    if validation is None:
        return
    if not validation.prompts:
        yield _Unused(OF_VALIDATION_VIDEOS, "validation has no prompts")
    if validation.cfg_scale == 1:
        yield _Unused(("validation.negative_prompt",), "cfg_scale is 1, which is no guidance")
    if validation.manifest is None:
        yield _Unused(("validation.bins",), "validation has no manifest of held-out clips")


def _of_sampling(cfg: InferenceConfig) -> Iterator[_Unused]:
    yield _Unused(OF_BACKWARD, "sampling has no backward pass")
    if cfg.prompts:
        yield _Unused(("prompt_path",), "there are prompts, which take its place")
    if cfg.aes is None and cfg.flow is None:
        yield _Unused(("score_style",), "aes and flow are None")
    if cfg.cond_type is None and cfg.scheduler.get("cfg_scale") == 1:
        yield _Unused(("negative_prompt",), "scheduler.cfg_scale is 1, which is no guidance")

    if cfg.cond_type is not None:
        yield _Unused(("condition_frame_edit",), "cond_type gives conditioning frames as they are")
    elif cfg.loop == 1:
        keys = ("condition_frame_length", "condition_frame_edit")
        yield _Unused(keys, "loop is 1, so no part continues another")


def _value(cfg: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def _is_set(cfg: Any, key: str) -> bool:
    section, _, name = key.rpartition(".")
    model = _value(cfg, section) if section else cfg
    return bool(getattr(model, name) != type(model).model_fields[name].default)
