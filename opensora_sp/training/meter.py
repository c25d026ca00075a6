"""How fast a run is and what it takes: work, waiting and memory of all ranks, between one line of the log and the next.

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

from opensora_sp.features.batch import Batch
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import CommTimer
from opensora_sp.planner.flops import ModelFlops

# Dense bf16 (and fp16) matrix products in TFLOP/s, from NVIDIA's and AMD's data sheets, whose larger numbers are with
# sparsity. By a part of the device's name; the first that is found counts.
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
    """What one device can do at best, in TFLOP/s, and how that is known. None where it is not."""

    tflops: float | None
    source: str

    @classmethod
    def of(cls, device: torch.device, precision: str, said: float | None) -> Peak:
        """Of the config's ``peak_tflops`` (``said``), else of a GPU that is known, in 16 bits."""
        if said is not None:
            return cls(said, "peak_tflops of the config")
        if device.type != "cuda":
            return cls(None, "the peak of a CPU is not known; set peak_tflops")
        return cls.of_gpu(torch.cuda.get_device_name(device), precision)

    @classmethod
    def of_gpu(cls, name: str, precision: str) -> Peak:
        if precision not in ("bf16", "fp16"):
            return cls(
                None,
                f"the peak of {name} is known in bf16 and fp16, not in {precision}; set peak_tflops",
            )
        if " MIG " in name:  # a part of a GPU
            return cls(None, f"the peak of {name} is not known; set peak_tflops")
        found = next(
            (tflops for pattern, tflops in PEAKS.items() if re.search(pattern, name)), None
        )
        if found is None:
            return cls(None, f"the peak of {name} is not known; set peak_tflops")
        return cls(found, f"dense {precision} of {name}")

    def __str__(self) -> str:
        if self.tflops is None:
            return f"no MFU: {self.source}"
        return f"MFU is a share of {self.tflops:g} TFLOP/s per device ({self.source})"


class Meter:
    """Measures from one ``measure`` to the next what happens while ``timer`` is entered. Every rank has one."""

    def __init__(
        self,
        model: ConditionedModel,
        device: torch.device,
        *,
        precision: str,
        sp_size: int,
        peak_tflops: float | None,
    ) -> None:
        self.device, self.sp_size = device, sp_size
        self.flops = ModelFlops.of(model)
        self.null_caption = len(model.y_embedder.y_embedding)
        self.peak = Peak.of(device, precision, peak_tflops)
        self.timer = CommTimer(device)
        self._work = 0.0
        self._step_times: list[float] = []  # in ascending order

    def count(self, batch: Batch) -> None:
        """Note a micro-batch that this rank's replica computes. Nothing waits for the device."""
        text = text_tokens(batch.text_lengths, batch.inputs["drop_caption"], self.null_caption)
        self._work += self.flops.step(tuple(batch.x_t.shape), text)

    def measure(self, waited: float, *, steps: int, seconds: float, left: int) -> dict[str, float]:
        """What all ranks did in ``steps`` optimizer steps that took ``seconds``. One collective, the same on all ranks.

        Args:
            waited: seconds that this rank waited for data.
            left: optimizer steps from here to the end of the run.

        Returns:
            "step_time" in seconds; "mfu" where the peak is known; of a step's time "data_wait" of the rank that
            waited longest (the others wait for it) and "communication", the mean; "peak_memory_gb" of the rank that
            took most, in 1e9 bytes; "eta" in seconds, by the median step so far.
        """
        # Shares of this rank's own time: ranks may come from writing a checkpoint one after the other.
        shares = [waited / seconds, self.timer.take() / seconds]
        numbers = [self._work, *shares, peak_memory(self.device)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        work, data, exchanges, memory = torch.stack(ranks, dim=1).tolist()
        self._work = 0.0
        insort(self._step_times, seconds / steps)
        told = {
            "step_time": seconds / steps,
            "data_wait": max(data),
            "communication": statistics.fmean(exchanges),
            "peak_memory_gb": max(memory) / 1e9,
            "eta": left * self._step_times[len(self._step_times) // 2],
        }
        if self.peak.tflops is not None:
            at_best = self.peak.tflops * 1e12 * len(ranks) * seconds
            told["mfu"] = (
                sum(work) / self.sp_size / at_best
            )  # the ranks of a replica counted the same work
        return told


def text_tokens(lengths: Sequence[int], drop: Tensor | None, null_caption: int) -> int:
    """Text tokens that the model sees, all samples together, as ``CaptionEmbedder.pack`` takes them.

    Args:
        lengths: tokens of each caption, B of them.
        drop: bool ``[B]`` on the CPU, True for samples that get the null caption of ``null_caption`` tokens instead.
    """
    dropped = [False] * len(lengths) if drop is None else drop.tolist()
    pairs = zip(lengths, dropped, strict=True)
    return sum(null_caption if is_dropped else max(length, 1) for length, is_dropped in pairs)


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has taken at most: of a GPU's memory what torch's tensors took, else of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024
