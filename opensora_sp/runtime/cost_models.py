"""Cost models by name, by device, and from the files of ``opensora-sp plan --calibrate``."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opensora_sp.common.files import atomic_write, read_json
from opensora_sp.parallel.cost_model import CPU, H100, H200, CostModel

MAX_BYTES = 1 << 16
KEYS = {"cost_model", "device", "versions", "date"}


class DataSheet(NamedTuple):
    """Peaks of a GPU by its data sheet.

    Attributes:
        tflops: of dense bf16 products that are summed in fp32.
        memory_bandwidth: GB/s.
        memory: GB, 1e9 bytes.
        link: GB/s that it sends to the GPUs of its node; over PCIe where NVLink joins pairs alone.
    """

    tflops: float
    memory_bandwidth: float
    memory: float
    link: float

    def rates(self, name: str) -> CostModel:
        """The rates that models reach: the shares of the peaks that an H100 and an H200 reach, in
        attention up to the rates of FlashAttention-2, which no newer GPU exceeds by much.
        """
        return replace(
            H100,
            name=name,
            flops=0.72 * self.tflops * 1e12,
            attention_forward=min(0.62 * self.tflops * 1e12, H100.attention_forward),
            attention_backward=min(0.53 * self.tflops * 1e12, H100.attention_backward),
            memory_bandwidth=0.8 * self.memory_bandwidth * 1e9,
            memory=self.memory * 1e9,
            bandwidth=0.78 * self.link * 1e9,
        )


# By the words of the names that drivers report. The sources are data sheets of NVIDIA unless stated
# otherwise; their figures with sparsity are halved.
SHEETS = {
    "B200": DataSheet(2250, 8000, 180, 900),  # HGX B200
    "GH200": DataSheet(989, 4000, 96, 450),
    "H200": DataSheet(989, 4800, 141, 450),
    "H200-NVL": DataSheet(835, 4800, 141, 450),
    "H100": DataSheet(989, 3350, 80, 450),
    "H100-NVL": DataSheet(835, 3900, 94, 64),
    "H100-PCIe": DataSheet(756, 2000, 80, 64),
    "H800": DataSheet(989, 3350, 80, 200),
    "H20": DataSheet(148, 4000, 96, 450),
    "A100-80GB": DataSheet(312, 2039, 80, 300),
    "A100-40GB": DataSheet(312, 1555, 40, 300),
    "A800": DataSheet(312, 2039, 80, 200),
    "A40": DataSheet(149.7, 696, 48, 32),
    "A30": DataSheet(165, 933, 24, 32),
    "A10": DataSheet(125, 600, 24, 32),
    "L40S": DataSheet(362, 864, 48, 32),
    "L40": DataSheet(181, 864, 48, 32),
    "L4": DataSheet(121, 300, 24, 32),
    "A6000": DataSheet(154.8, 768, 48, 32),
    "RTX-5090": DataSheet(209.5, 1792, 32, 64),  # RTX Blackwell GPU architecture, appendix
    "RTX-4090": DataSheet(165.2, 1008, 24, 32),  # Ada GPU architecture, appendix A
    "RTX-3090": DataSheet(71, 936, 24, 32),  # GA102 GPU architecture, appendix A
}
GPUS = {name: sheet.rates(name) for name, sheet in SHEETS.items()}
# Measured, or assumed in part: see ``parallel/cost_model.py``.
GPUS |= {"H100": H100, "H200": H200}
PRESETS = {**GPUS, "CPU": CPU}


def gpu_of(device_name: str) -> str | None:
    """The name in ``SHEETS`` of a GPU whose driver reports ``device_name``; None if it is unknown.

    A MIG instance is a part of a GPU, which no sheet describes.
    """
    words = set(re.findall(r"\w+", device_name))
    names = [name for name in SHEETS if words.issuperset(name.split("-"))]
    return None if "MIG" in words else max(names, key=len, default=None)


def preset_of(device_name: str | None) -> CostModel:
    """The preset of a GPU by the name that its driver reports; of a CPU if that is None.

    A GPU without a preset has an H100's.
    """
    return CPU if device_name is None else GPUS.get(gpu_of(device_name) or "", H100)


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
