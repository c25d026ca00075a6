"""Ranks take the same kernels: what differs on the device of one rank is replaced on all."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from planted_kernels import plant
from ranks import run_ranks

from opensora_sp import device_verification as verification
from opensora_sp.device_verification import choose_kernels
from opensora_sp.models.kernels import fused
from opensora_sp.models.kernels.verification import verify_kernel

MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=72, num_heads=1, mlp_ratio=2.0))
CPU = torch.device("cpu")


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def choose(setting, fault_of_rank):
    """Choices, messages and error of a rank, whose device is the CPU; two kernels, alike."""
    plant(fault_of_rank[dist.get_rank()])
    verification.kernel_names = lambda: ["other", "planted"]
    verification.obstacle = lambda device: None
    verification._check_device = lambda *args: None

    def verify(name, sizes, dtype, device):
        return verify_kernel(name, sizes, dtype, CPU) if name == "planted" else []

    verification.verify_kernel = verify
    messages = Messages()
    verification.logger.addHandler(messages)
    verification.logger.setLevel(logging.INFO)

    used, error = None, None
    try:
        used = choose_kernels(setting, MODEL, dtype=torch.float32, device=torch.device("cuda"))
    except ValueError as raised:
        error = str(raised)
    return used, dict(fused._verified), messages.texts, error


@pytest.mark.parametrize("fault", ["gradient", "error"])
def test_one_rank_that_differs_decides_for_all(fault):
    of_ranks = run_ranks(3, choose, "auto", ["none", "none", fault])
    for used, verified, texts, error in of_ranks:
        assert error is None
        assert used == {"other": "triton", "planted": "torch"}
        assert verified == {"other": (torch.float32,), "planted": ()}
        warning, line = texts
        assert "(planted: on rank 2: " in warning
        assert line.startswith("kernels: other by Triton (verified in ")


def test_with_triton_all_ranks_raise_the_same_error():
    of_ranks = run_ranks(2, choose, "triton", ["value", "none"])
    errors = {error for *_, error in of_ranks}
    assert len(errors) == 1 and "(planted: on rank 0: output 0 of multiply" in errors.pop()
