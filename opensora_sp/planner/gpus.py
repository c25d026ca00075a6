"""Speeds of GPUs, by which step times are predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opensora_sp.parallel.cost_model import H100 as H100_LINKS
from opensora_sp.parallel.cost_model import H200 as H200_LINKS
from opensora_sp.parallel.cost_model import LAUNCH, CostModel


@dataclass(frozen=True)
class Gpu:
    """What a GPU reaches, in FLOP/s, bytes per second and seconds.

    Args:
        peak: of dense bf16 products, from the data sheet: model FLOPs utilisation is a share of it.
        matmul: that matrix products of a transformer reach.
        attention_forward, attention_backward: of FlashAttention-2, on its padded tiles.
        bandwidth: of memory, that elementwise kernels reach.
        memory: bytes.
        shortest_kernel: seconds of a kernel that has nothing to do.
        launch: seconds in which the host queues an operator.
        to_host: bytes per second between its memory and pinned memory of the host, each way.
        links: bandwidth and latency of an all-to-all among the GPUs of a node.
        capability: compute capability.
    """

    peak: float
    matmul: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    memory: float
    shortest_kernel: float
    launch: float
    to_host: float
    links: CostModel
    capability: tuple[int, int] = (9, 0)


# 90 % of what was measured on one H200: 790 TFLOP/s in bf16 products and 4.3 TB/s in copies.
# FlashAttention-2 at its published rates on padded tiles, 55 to 83 ms for 13,800 launches.
# PCIe 5.0 x16 has 63 GB/s each way, of which 50 are assumed.
H200 = Gpu(
    peak=989e12,
    matmul=711e12,
    attention_forward=330e12,
    attention_backward=280e12,
    bandwidth=3.87e12,
    memory=141e9,
    shortest_kernel=2e-6,
    launch=LAUNCH,
    to_host=50e9,
    links=H200_LINKS,
)

# An H100 differs in its memory alone: 3.0 TB/s in copies are assumed.
H100 = replace(H200, bandwidth=2.7e12, memory=80e9, links=H100_LINKS)

GPUS = {"H100": H100, "H200": H200}
