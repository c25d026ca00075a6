"""Ranks take the same kernels of attention: what is wrong on one rank is left out on all."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from opensora_sp import device_verification as verification
from opensora_sp.device_verification import choose_attention
from opensora_sp.models import attention as module
from opensora_sp.models import build_model
from opensora_sp.models.attention import choose_backends
from opensora_sp.models.attention_table import HOPPER, Platform, Sequences
from opensora_sp.models.kernels import verification as kernel_verification
from opensora_sp.models.kernels.verification import compare

LENGTHS = {"spatial": [256], "temporal": [16], "cross": [6]}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen_on_rank(fault: str) -> tuple[str, list[str]]:
    """The kernel of spatial attention on a "GPU", which is the CPU, and the warnings.

    Rank 1 has the fault.
    """
    rank = dist.get_rank()
    fault = fault if rank == 1 else "none"
    right = module._sdpa_rows

    def rows(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == "cudnn" and fault == "error":
            raise RuntimeError("no execution plan")
        out = right(name, q, k, v)
        return 2 * out if name == "cudnn" and fault == "value" else out

    def on_cpu(kernel: Any, define: Any, example: Any, dtype: Any, device: Any) -> Any:
        return compare(kernel, define, example, dtype, CPU)

    platform = Platform(HOPPER, cudnn=0 if fault == "missing" else 91501)
    module._sdpa_rows, kernel_verification.compare = rows, on_cpu
    Platform.of = lambda device, deterministic: platform
    processors = SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device: processors
    verification.run_lengths = lambda *args: LENGTHS
    verification._check_device = lambda *args: None
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    verification.logger.addHandler(handler)

    model = build_model("STDiT3", hidden_size=16, depth=1, num_heads=2, model_max_length=6)
    choose_attention(None, model, dtype=torch.bfloat16, device=CUDA)
    spatial = Sequences(torch.bfloat16, 8, "spatial", 256)
    return choose_backends("auto", {"spatial": spatial}, CUDA)["spatial"].name, warnings


@pytest.mark.parametrize("fault", ["value", "error", "missing"])
def test_what_is_wrong_on_one_rank_is_left_out_on_all(fault: str) -> None:
    for name, warnings in run_ranks(2, chosen_on_rank, fault):
        assert name == "sdpa"
        (warning,) = warnings
        assert "(cuDNN: on rank 1: " in warning
