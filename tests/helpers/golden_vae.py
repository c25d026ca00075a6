"""The video autoencoder of Open-Sora 1.2 with the weights of the reference values."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import golden_values
import torch
from golden_values import under
from safetensors.torch import save_file

load = partial(golden_values.load, "video_vae")


def saved_pipeline(folder: Path, about: dict, tensors: dict[str, torch.Tensor], case: dict) -> Path:
    """A folder as the release's ``save_pretrained`` writes it, with the weights of a case."""
    from diffusers import AutoencoderKL

    AutoencoderKL.from_config(about["spatial"]["constructor"]).save_config(folder / "image" / "vae")
    config = {
        "architectures": ["VideoAutoencoderPipeline"],
        "model_type": "VideoAutoencoderPipeline",
        "cal_loss": False,
        "micro_frame_size": case["micro_frame_size"],
        "scale": case["scale"],
        "shift": case["shift"],
        "vae_2d": {
            "type": "VideoAutoencoderKL",
            "from_pretrained": str(folder / "image"),
            "subfolder": "vae",
        },
        "vae_temporal": {
            "type": "VAE_Temporal",
            "from_pretrained": None,
            **about["temporal_constructor"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    buffers = {name: tensors[f"{case['case']}/{name}"] for name in ("scale", "shift")}
    save_file({**under(tensors, "state/"), **buffers}, folder / "model.safetensors")
    return folder
