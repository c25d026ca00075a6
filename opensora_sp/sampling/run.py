"""The sampling run: check, join the processes, load, sample, write."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from opensora_sp.config import InferenceConfig, build_component, split_type
from opensora_sp.data import to_frames, write_video
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, planned_latent_size
from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.registry import model_class, resolve_config
from opensora_sp.parallel import SequenceMesh, check_sp_size, parallelize
from opensora_sp.weights import check_encoders, check_model_config, check_names, newest_checkpoint

from .conditioning import Prompt, parse_prompt, prompt_of_loop
from .contact_sheet import write_contact_sheet
from .pipeline import Pipeline

logger = logging.getLogger(__name__)


def sample(cfg: InferenceConfig) -> list[Path]:
    """Sample a video for every prompt of the config; returns the mp4 files this rank wrote.

    Every process takes part: groups of ``sp_size`` (all of them by default) share the work on a batch of prompts, and
    several groups take batches in turn. The processes of a group write the videos of a batch in turn.

    Raises:
        ValueError: before the model is built, if prompts, checkpoint and processes do not fit the config.
    """
    sp_size, weights = preflight(cfg)
    device = join_processes()
    try:
        written = _sample_on(SequenceMesh(sp_size), cfg, weights, device)
        gc.collect()  # groups that outlive the process group can abort the interpreter at exit
        if dist.is_initialized():
            dist.barrier()
        return written
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def preflight(cfg: InferenceConfig) -> tuple[int, Path]:
    """``sp_size`` and the folder of the weights, checked; the same on every rank."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    sp_size = cfg.sp_size or world_size
    check_sp_size(sp_size, world_size)
    if not cfg.prompts:
        raise ValueError("got no prompts; expected at least one; pass --prompt TEXT or --prompts FILE")
    check_given(cfg)
    if cfg.ckpt is None:
        raise ValueError("got no checkpoint; expected trained weights; pass --ckpt PATH")
    weights = find_weights(cfg.ckpt, use_ema=cfg.use_ema)
    name, options = split_type("model", cfg.model)
    check_model_config(weights, model_class(name).__name__, resolve_config(name, **options))
    return sp_size, weights


def parse(cfg: InferenceConfig, text: str) -> Prompt:
    return parse_prompt(text, cfg.reference_path, cfg.mask_strategy)


def check_given(cfg: InferenceConfig) -> None:
    """Raise ValueError if references are missing or strategies and loops impossible."""
    for text in cfg.prompts:
        prompt_of_loop(parse(cfg, text).text, cfg.loop - 1)
    frames = planned_latent_size(cfg.vae, cfg.num_frames, *cfg.size)[0]
    if cfg.loop > 1 and cfg.condition_frame_length >= frames:
        raise ValueError(
            f"got loop {cfg.loop} with condition_frame_length {cfg.condition_frame_length}; expected fewer than the "
            f"{frames} latent frames of a part, so that some are new; lower it or raise num_frames"
        )


def find_weights(ckpt: str, *, use_ema: bool) -> Path:
    """The folder of ``config.json`` and ``model.safetensors`` that a run's folder or a checkpoint stands for."""
    place = Path(ckpt)
    if not (place / "model.safetensors").is_file():
        checkpoint = newest_checkpoint(place)
        if checkpoint is None:
            raise ValueError(
                f"got checkpoint {ckpt!r}, which holds no weights; expected a run's folder, a checkpoint step_..., or "
                "a folder with config.json and model.safetensors; check --ckpt"
            )
        place = checkpoint / ("ema" if use_ema else "model")
    return place


def join_processes() -> torch.device:
    """Initialise the process group if a launcher started several processes; returns this process's device."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def build_pipeline(cfg: InferenceConfig, weights: Path, mesh: SequenceMesh, device: torch.device) -> Pipeline:
    """Model with its weights, wrapped for the mesh, and the encoders."""
    vae = build_component(cfg.vae, LATENT_ENCODERS).to(device)
    text_encoder = build_component(cfg.text_encoder, TEXT_ENCODERS).to(device)
    name, options = split_type("model", cfg.model)
    model = build_model(name, **options)
    check_encoders(model.config, vae, text_encoder)
    load_weights(model, weights)
    model.requires_grad_(False).eval().to(device, DTYPES[cfg.precision])
    if cfg.compile is not None:
        compile_blocks(model)
    parallelize(model, mesh, **dict(cfg.sequence_parallel))
    return Pipeline(cfg, model, vae, text_encoder, device)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load ``folder/model.safetensors`` strictly."""
    state = load_file(folder / "model.safetensors")
    check_names(folder, {name: tuple(t.shape) for name, t in state.items()}, model.state_dict(), exact=True)
    model.load_state_dict(state)


def _sample_on(mesh: SequenceMesh, cfg: InferenceConfig, weights: Path, device: torch.device) -> list[Path]:
    from tqdm import tqdm

    pipeline = build_pipeline(cfg, weights, mesh, device)
    folder = Path(cfg.outputs)
    folder.mkdir(parents=True, exist_ok=True)
    numbered = list(enumerate(cfg.prompts))
    batches = [numbered[i : i + cfg.batch_size] for i in range(0, len(numbered), cfg.batch_size)]
    mine = batches[mesh.dp_rank :: mesh.dp_size]
    steps = pipeline.flow.num_sampling_steps * cfg.loop
    bar = tqdm(total=len(mine) * steps, desc="sample", unit="step", disable=mesh.rank != 0, dynamic_ncols=True)
    written = []
    for batch in mine:
        indices, prompts = [index for index, _ in batch], [parse(cfg, text) for _, text in batch]
        parts = pipeline.looped(prompts, indices, on_step=lambda: bar.update(1))
        for place in range(mesh.sp_rank, len(batch), mesh.sp_size):
            video = pipeline.video([part[place] for part in parts])
            written.append(_write(cfg, folder, indices[place], prompts[place], to_frames(video)))
    bar.close()
    return written


def _write(cfg: InferenceConfig, folder: Path, index: int, prompt: Prompt, frames) -> Path:  # noqa: ANN001
    """mp4, contact sheet and a JSON that says how the video came about."""
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.text.lower()).strip("-")[:60]
    path = folder / f"{index:03d}-{slug}.mp4"
    write_video(path, frames, fps=cfg.fps)
    write_contact_sheet(path.with_suffix(".png"), [(prompt.text, frames)])
    facts: dict[str, Any] = {
        "prompt": prompt.text,
        "index": index,
        "seed": cfg.seed,
        "ckpt": cfg.ckpt,
        "num_frames": cfg.num_frames,
    }
    facts |= {"image_size": list(cfg.size), "fps": cfg.fps, "scheduler": cfg.scheduler}
    facts |= {"negative_prompt": cfg.negative_prompt, "loop": cfg.loop}
    facts |= {"reference_path": prompt.reference_path, "mask_strategy": prompt.mask_strategy}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    logger.info("wrote %s", path)
    return path
