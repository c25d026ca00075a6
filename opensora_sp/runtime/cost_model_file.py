"""Cost models by name, by device, and from the files of ``opensora-sp plan --calibrate``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from opensora_sp.common.files import atomic_write, read_json
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.gpus import PRESETS, preset_of

MAX_BYTES = 1 << 16
KEYS = {"cost_model", "device", "versions", "date"}


def cost_model_of(setting: str | None, default: CostModel | None = None) -> CostModel:
    """The cost model that a config names.

    Args:
        setting: a preset's name, or the path of a file; None is the default.
        default: None is the preset of the device that this process computes on.

    Raises:
        ValueError: if the file is missing, or not one that ``write_cost_model`` wrote.
    """
    if setting is None:
        return default or preset_of(device_name())
    return PRESETS[setting] if setting in PRESETS else read_cost_model(setting)


def read_cost_model(path: str | Path) -> CostModel:
    """The cost model of a file.

    Raises:
        ValueError: if it is missing, larger than ``MAX_BYTES``, or has other keys.
    """
    try:
        content = read_json(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise ValueError(
            f"got cost_model {str(path)!r}, which cannot be read ({error.strerror}); expected one "
            f"of {', '.join(PRESETS)} or a file; correct it, or measure one with opensora-sp plan "
            "--calibrate FILE"
        ) from None

    if not isinstance(content, dict) or content.keys() != KEYS:
        raise ValueError(
            f"got {path} without the keys of a cost model; expected {sorted(KEYS)}; measure it "
            "anew with opensora-sp plan --calibrate FILE"
        )
    return CostModel.from_dict(content["cost_model"])


def write_cost_model(path: Path, model: CostModel, facts: dict[str, Any]) -> None:
    """Write a file for ``read_cost_model``, at once or not at all.

    Args:
        facts: the keys of the file in addition to the model.
    """
    text = json.dumps({"cost_model": model.to_dict(), **facts}, indent=1, ensure_ascii=False)
    with atomic_write(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def device_name() -> str | None:
    """The name of this process's GPU; None where it computes on a CPU."""
    if not torch.cuda.is_available():
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_name(local_rank % torch.cuda.device_count())
