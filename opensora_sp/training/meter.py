"""Step time, MFU, communication time, data wait and peak memory, over an interval of the log.

Legend: B samples, L text tokens.
"""

from __future__ import annotations

import re
import resource
import statistics
import sys
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.features.batch import Batch
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import CommTimer, SequenceMesh
from opensora_sp.planner.seconds import ModelFlops

# Peak TFLOP/s of dense bf16 and fp16 matrix products, from the data sheets of NVIDIA and AMD
# (without sparsity), by a pattern in the device's name. The first match counts.
PEAKS = {
    r"\bB200\b": 2250.0,
    r"\bH(100|200) NVL\b": 835.0,
    r"\bH100 PCIe\b": 756.0,
    r"\b(H100|H200|H800|GH200)\b": 989.0,
    r"\bH20\b": 148.0,
    r"\b(A100|A800)\b": 312.0,
    r"\bA30\b": 165.0,
    r"\bA40\b": 149.7,
    r"\bA10\b": 125.0,
    r"\bL40S\b": 362.0,
    r"\bL40\b": 181.0,
    r"\bL4\b": 121.0,
    r"\bRTX A6000\b": 154.8,
    r"\bRTX 4090\b": 165.2,
    r"\bRTX 3090\b": 71.0,
    r"\bMI300X\b": 1307.4,
}


class Peak(NamedTuple):
    """Peak TFLOP/s of one device, None if it is not known, and where the number is from."""

    tflops: float | None
    source: str

    @classmethod
    def of(cls, device: torch.device, precision: str, configured: float | None) -> Peak:
        """The config's ``peak_tflops`` if it has one, else the peak of a known GPU in 16 bits."""
        if configured is not None:
            return cls(configured, "peak_tflops of the config")
        if device.type != "cuda":
            return cls(None, "the peak of a CPU is not known; set peak_tflops")
        return cls.of_gpu(torch.cuda.get_device_name(device), precision)

    @classmethod
    def of_gpu(cls, name: str, precision: str) -> Peak:
        """Peak of a GPU by its name."""
        if precision not in ("bf16", "fp16"):
            known = "is known in bf16 and fp16"
            return cls(None, f"the peak of {name} {known}, not in {precision}; set peak_tflops")
        for pattern, tflops in PEAKS.items():
            # A MIG instance is a part of a GPU.
            if re.search(pattern, name) and " MIG " not in name:
                return cls(tflops, f"dense {precision} of {name}")
        return cls(None, f"the peak of {name} is not known; set peak_tflops")

    def __str__(self) -> str:
        if self.tflops is None:
            return f"no MFU: {self.source}"
        return f"MFU is a share of {self.tflops:g} TFLOP/s per device ({self.source})"


class Meter:
    """Measures what happens while ``timer`` is entered, between two calls of ``measure``.

    Attributes:
        by_rank: of the last call of ``measure``, numbers that differ between ranks, by rank.
    """

    def __init__(
        self,
        model: ConditionedModel,
        device: torch.device,
        *,
        precision: str,
        mesh: SequenceMesh,
        peak_tflops: float | None,
    ) -> None:
        self.device, self.mesh = device, mesh
        self.flops = ModelFlops.of(model)
        self.null_caption = len(model.y_embedder.y_embedding)
        self.peak = Peak.of(device, precision, peak_tflops)
        self.timer = CommTimer(device)
        self.by_rank: dict[str, list[float]] = {}
        self._work = 0.0
        # In ascending order.
        self._step_times: list[float] = []

    def count(self, batch: Batch) -> None:
        """Add this rank's share of the FLOPs of a micro-batch of the current group, without waiting
        for the device.
        """
        text = text_tokens(batch.text_lengths, batch.inputs["drop_caption"], self.null_caption)
        self._work += self.flops.step(tuple(batch.x_t.shape), text) / self.mesh.sp_size

    def measure(self, waited: float, *, steps: int, seconds: float, left: int) -> dict[str, float]:
        """Metrics of all ranks over ``steps`` steps that took ``seconds``. One collective.

        Args:
            waited: seconds that this rank waited for data.
            left: optimizer steps to the end of the run.

        Returns:
            "step_time" in seconds; "mfu" where the peak is known; as fractions of a step's time,
            "data_wait" of the rank that waited longest (the others wait for it) and
            "communication", the mean; "peak_memory_gb" of the rank with the largest peak, in 1e9
            bytes; "eta" in seconds, by the median step so far.
        """
        # Fractions of this rank's own time: ranks may finish writing a checkpoint at different
        # times.
        shares = [waited / seconds, self.timer.take() / seconds]
        numbers = [self._work, *shares, peak_memory(self.device)]
        local = to_device(torch.tensor(numbers, dtype=torch.float64), self.device)
        ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, local)
        work, data_wait, communication, memory = torch.stack(ranks, dim=1).tolist()
        self._work = 0.0
        self.by_rank = {
            "data_wait": data_wait,
            "communication": communication,
            "peak_memory_gb": [num_bytes / 1e9 for num_bytes in memory],
        }

        # A median, since a step with a compilation or a slow read says nothing of the rest.
        insort(self._step_times, seconds / steps)
        metrics = {
            "step_time": seconds / steps,
            "data_wait": max(data_wait),
            "communication": statistics.fmean(communication),
            "peak_memory_gb": max(memory) / 1e9,
            "eta": left * self._step_times[len(self._step_times) // 2],
        }
        if self.peak.tflops is not None:
            at_peak = self.peak.tflops * 1e12 * len(ranks) * seconds
            metrics["mfu"] = sum(work) / at_peak
        return metrics


def text_tokens(lengths: Sequence[int], drop: Tensor | None, null_caption: int) -> int:
    """Text tokens of all samples together, as ``CaptionEmbedder.pack`` packs them.

    Args:
        lengths: tokens of each caption, B of them.
        drop: bool ``[B]`` on the CPU, True for samples that get the null caption of
            ``null_caption`` tokens instead.
    """
    # An empty caption is one token, since attention needs a key.
    tokens = torch.tensor(lengths).clamp(min=1)
    if drop is not None:
        tokens = torch.where(drop, null_caption, tokens)
    return int(tokens.sum())


def peak_memory(device: torch.device) -> int:
    """Peak bytes of torch's tensors on a GPU, else of this process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024
