"""Checks of a training run before a process group or a model exists."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from opensora_sp.checkpoint.model_config import check_model_config
from opensora_sp.checkpoint.paths import had_checkpoints
from opensora_sp.checkpoint.state_dict import fitted
from opensora_sp.common.files import check_writable, read_json
from opensora_sp.config import TrainConfig
from opensora_sp.config.launch_checks import check_launch
from opensora_sp.config.sections import Lora
from opensora_sp.data.cache import CachedFeatures
from opensora_sp.data.sampler import BatchPlan
from opensora_sp.encoders import check_packages
from opensora_sp.evaluation.heldout import heldout_clips
from opensora_sp.features.build import (
    TrainingSet,
    largest_batch,
    make_dataset,
    make_plan,
    micro_batches_of_step,
    order_state,
    with_length,
)
from opensora_sp.features.cached import check_cache, check_clips
from opensora_sp.features.same_clips import OF_CLIPS, by_name, changes
from opensora_sp.runtime.host_checks import check_shared_memory

from .checkpointing import find_checkpoint
from .memory_fit import provisional, recorded
from .profiling import Steps
from .trackers import check_trackers
from .trainable import (
    check_optimizer,
    check_same_state,
    check_start,
    check_trained,
    initial_weights,
)

logger = logging.getLogger(__name__)


def preflight(
    cfg: TrainConfig,
    resume: str | None,
    traced: Steps | None = None,
    *,
    accept_new_data: bool = False,
) -> tuple[TrainingSet, Path | None]:
    """Check config, files, checkpoint and machine; the same on every rank.

    Args:
        accept_new_data: resume also with other clips than the checkpoint has.

    Returns:
        The dataset, and the checkpoint to resume from.

    Raises:
        ValueError: if the run could not start, resume or finish.
    """
    if accept_new_data and resume in (None, "none"):
        raise ValueError(
            "got --accept-new-data without --resume; expected a run to resume; add --resume auto, "
            "or leave --accept-new-data out"
        )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # What reads no file comes first: its errors cost no time.
    check_launch(cfg, world_size)
    check_trained(cfg)
    check_optimizer(cfg)
    check_writable(Path(cfg.outputs))

    dataset = make_dataset(cfg)
    checkpoint = find_checkpoint(Path(cfg.outputs), resume) if resume else None
    state = {} if checkpoint is None else read_json(checkpoint / "state.json")
    # Batch sizes that are left out are chosen by the memory that encoders leave.
    cfg = provisional(cfg, checkpoint)
    per_step = micro_batches_of_step(cfg, {}, world_size)
    plan = make_plan(cfg, dataset, per_step)
    cfg = with_length(cfg, plan)
    if isinstance(dataset, CachedFeatures):
        check_cache(cfg, dataset)
        check_clips(cfg, dataset, plan)
    else:
        check_packages(cfg.text_encoder)
    if cfg.validation is not None:
        # Sampling's modules would lengthen the start of runs without validation.
        from .validation import preflight_validation

        preflight_validation(cfg)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_shared_memory(largest_batch(cfg), cfg.num_workers, local_world_size)
    check_trackers(cfg)

    if resume is None and had_checkpoints(Path(cfg.outputs)):
        raise ValueError(
            f"got outputs {cfg.outputs!r}, which holds checkpoints of an earlier run; expected a "
            "new folder, or that run to be resumed; pass --resume auto or another "
            "--cfg-options outputs=..."
        )
    if checkpoint is not None:
        check_resume(cfg, checkpoint, dataset, accept_new_data=accept_new_data)
        spec = cfg.model_spec
        check_model_config(checkpoint / "model", spec.model_class.__name__, spec.config)
    # A resumed run has its weights in the checkpoint, but adapters need their base.
    if cfg.load is not None and (checkpoint is None or cfg.lora is not None):
        check_initial_weights(cfg)
    if cfg.lora is not None and checkpoint is None:
        check_start(cfg, cfg.lora)
    if traced is not None:
        traced.check(state.get("step", 0), cfg.max_steps)
    return dataset, checkpoint


def compared_clips(cfg: TrainConfig, dataset: TrainingSet) -> dict[str, str]:
    """Digests of the clips, by the name of what they summarize, which all ranks must have alike."""
    clips = by_name(dataset.fingerprint)
    if isinstance(dataset, CachedFeatures):
        # The captions' lengths and clips of a cache come from its index, which hosts may have
        # copied.
        clips["index of dataset.path"] = dataset.index_digest
    heldout = heldout_clips(cfg)
    if heldout is not None:
        clips |= by_name(heldout.fingerprint, "validation.manifest")
    return clips


def check_resume(
    cfg: TrainConfig, checkpoint: Path, dataset: TrainingSet, *, accept_new_data: bool = False
) -> None:
    """Raise ValueError if resuming would change data order or draws; warn of another loss."""
    cfg, state, plan = _resumed(cfg, checkpoint, dataset)
    if state["loss_weight"] != cfg.loss_weight:
        # No error: data and draws stay the same, and some change it on purpose.
        message = "loss_weight is %r, and was %r up to %s: the mean that is trained on changes"
        logger.warning(message, cfg.loss_weight, state["loss_weight"], checkpoint)

    ours = order_state(cfg, plan, len(dataset))
    if cfg.micro_batches_per_step is not None:
        ours["micro_batches_per_step"] = cfg.micro_batches_per_step
    _check_same_order(ours, state, checkpoint, dataset, accept_new_data=accept_new_data)
    _check_same_lora(cfg, state["config"].get("lora"), checkpoint)
    check_same_state(cfg, state["config"]["optimizer"], checkpoint)
    if isinstance(dataset, CachedFeatures):
        check_clips(cfg, dataset, plan)


def nothing_left(cfg: TrainConfig, checkpoint: Path | None, dataset: TrainingSet) -> str | None:
    """Why a run that resumes from ``checkpoint`` has no step left; None where it has some."""
    if checkpoint is None:
        return None
    cfg, state, plan = _resumed(cfg, checkpoint, dataset)
    cfg = with_length(cfg, plan)
    if state["step"] < cfg.max_steps:
        return None
    key = "max_steps" if cfg.epochs is None else "epochs"
    return (
        f"nothing left to do: {checkpoint} is of step {state['step']}, and the run ends after "
        f"step {cfg.max_steps}; to train longer, raise {key}"
    )


def _resumed(
    cfg: TrainConfig, checkpoint: Path, dataset: TrainingSet
) -> tuple[TrainConfig, dict[str, Any], BatchPlan]:
    """The config with the checkpoint's batch sizes, its ``state.json``, and the run's plan."""
    cfg, state = recorded(cfg, checkpoint), read_json(checkpoint / "state.json")
    per_step = state["micro_batches_per_step"]
    return cfg, state, make_plan(cfg, dataset, per_step)


def _check_same_lora(cfg: TrainConfig, saved: dict[str, Any] | None, checkpoint: Path) -> None:
    """Raise ValueError unless a checkpoint has the adapters of the config."""

    def compared(lora: Lora | None) -> dict[str, Any] | None:
        # Where a run's first adapters come from does not matter any more.
        return None if lora is None else lora.model_dump(mode="json", exclude={"load"})

    # Checkpoints from before a key was added have its default.
    ours, saved = compared(cfg.lora), compared(None if saved is None else Lora(**saved))
    if ours != saved:
        raise ValueError(
            f"got lora = {ours} to resume from {checkpoint}, which was written with lora = "
            f"{saved}; expected the same; change it back, or start a new run with another "
            "--cfg-options outputs=..."
        )


def _check_same_order(
    ours: dict[str, Any],
    state: dict[str, Any],
    checkpoint: Path,
    dataset: TrainingSet,
    *,
    accept_new_data: bool,
) -> None:
    """Raise ValueError where seed, batches or clips differ from a checkpoint's ``state``."""
    columns = by_name(dataset.fingerprint)
    recorded = {key: state.get(key) for key in ours} | by_name(state.get("manifest_columns", {}))
    changed = changes(ours | columns, recorded)
    new_data = changed.keys() & {*OF_CLIPS, *columns}

    if accept_new_data and changed and changed.keys() == new_data:
        logger.warning("new data accepted: %s", ", ".join(changed.values()))
    elif changed:
        accept = "accept the new clips with --accept-new-data, " if new_data else ""
        raise ValueError(
            f"got {', '.join(changed.values())} to resume from {checkpoint}; expected what it was "
            f"written with, which data order and random draws depend on; change it back, {accept}"
            f"or start a new run from these weights with --cfg-options load={checkpoint}"
        )


def check_initial_weights(cfg: TrainConfig) -> None:
    """Raise ValueError if ``cfg.load`` cannot be read, or holds weights of another model."""
    weights, spec = initial_weights(cfg), cfg.model_spec
    # Adapters are for whole weights: checkpoints hold nothing that is initialized here.
    options: dict[str, Any] = dict(convert=cfg.convert, allow_base=cfg.lora is None)
    if weights.config is not None:
        check_model_config(weights.path, spec.model_class.__name__, spec.config, **options)
    # Names and shapes are enough.
    with torch.device("meta"):
        fitted(weights, spec.build(), **options)
