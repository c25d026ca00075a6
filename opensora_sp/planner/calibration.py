"""Measure the rates of a cost model on the machine at hand: ``opensora-sp plan --calibrate``.

Products and attention are measured by themselves, launches by a model that computes next to
nothing, and elementwise kernels by the rest of the time of a pair of blocks. An all-to-all between
the ranks of a node, and between nodes, takes a latency and the time of its bytes: a line
through several sizes. Every number is the least of its repeats, as other processes only add time.
On a CPU with one thread, its own CPU time counts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from opensora_sp.models.registry import REFERENCE, REFERENCE_PRESET, model_class, resolve_config
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.options import Options
from opensora_sp.runtime.cost_models import device_name, preset_of

from .seconds import ModelFlops, seconds_of
from .trace import step_inputs

REPEATS, EXCHANGES_REPEATED = 5, 10
CPU_WIDTH, HEADS, TEXT = 384, 6, 32
"""Sizes of the pair of blocks on a CPU; a GPU computes a pair of ``REFERENCE_PRESET``."""
UNLIMITED = 1e30  # bytes per second
SENT_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


def calibrate(device: torch.device) -> CostModel:
    """Measure this process's device, and its links to the other ranks. Collective.

    Layers are as wide as ``CPU_WIDTH`` on a CPU, and as STDiT3-XL/2 on a GPU.

    Returns:
        The rates of rank 0, on all ranks. A link that there is not has its preset's rates.
    """
    measurement = _Measurement(device)
    measurement.products()
    measurement.attention()
    measurement.launches()
    measurement.elementwise()
    measurement.links()

    result = [measurement.rates]
    if dist.is_initialized():
        # Ranks choose strategies by these numbers, so all need the same.
        dist.broadcast_object_list(result, src=0)
    return result[0]


class _Measurement:
    """Measures one rate after the other; ``rates`` has all found so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        preset, name = preset_of(device_name()), device_name() or "CPU"
        if self.on_gpu:
            total = torch.cuda.get_device_properties(device).total_memory
            preset = replace(preset, memory=float(total))
        self.rates = replace(preset, name=name)

        self.width, self.heads, self.tokens = CPU_WIDTH, HEADS, 1_024
        if self.on_gpu:
            self.width, self.heads, self.tokens = 1152, 16, 16_384

    def products(self) -> None:
        """Matrix products of an MLP, forward."""
        x = self._random(self.tokens, self.width)
        up = self._random(4 * self.width, self.width)
        down = self._random(self.width, 4 * self.width)
        seconds = self._seconds(lambda: F.linear(F.linear(x, up), down))
        flops = 16.0 * self.tokens * self.width**2
        self.rates = replace(self.rates, flops=flops / seconds)

    def attention(self) -> None:
        """Attention over rows of 256 tokens, forward and backward, as blocks compute it."""
        length, width = 256, self.width // self.heads
        rows = self.tokens // length
        q, k, v = (self._random(rows, self.heads, length, width) for _ in range(3))
        forward = self._seconds(lambda: F.scaled_dot_product_attention(q, k, v))

        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v)
        grad = torch.ones_like(out)
        backward = self._seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, True))

        unit = replace(self.rates, attention_forward=1.0, attention_backward=1.0)
        arguments = (rows * self.heads, length, length, width)
        self.rates = replace(
            self.rates,
            attention_forward=unit.attention(*arguments) / forward,
            # The rate of the tiles alone: the sums in fp32 are small.
            attention_backward=unit.attention(*arguments, backward=True) / backward,
        )

    def launches(self) -> None:
        """Operators of a step whose tensors have next to no elements."""
        seconds, model = self._step(width=8 * 2, heads=2, size=(1, 2, 2, 2), depth=2)
        passes = model.forward_counts, model.backward_counts
        operators = sum(2 * counts.operators + counts.once for counts in passes)
        self.rates = replace(self.rates, launch=seconds / operators)

    def elementwise(self) -> None:
        """The rest of a step, without products, attention and launches."""
        size = (1, 16, 64, 64) if self.on_gpu else (1, 4, 32, 32)
        seconds, model = self._step(self.width, self.heads, size, depth=2)

        def predicted(memory_bandwidth: float) -> float:
            rates = replace(self.rates, memory_bandwidth=memory_bandwidth)
            shape = BatchShape.of(model.config, size[0], size[1:])
            options = Options(cost_model=rates)
            return seconds_of(shape, options, 1, model=model, element_size=self.dtype.itemsize)

        without, at_one = predicted(UNLIMITED), predicted(1.0)
        # Noise may leave nothing, and a rate must be positive.
        rest = max(seconds - without, 0.05 * seconds)
        bandwidth = (at_one - without) / rest
        self.rates = replace(self.rates, memory_bandwidth=bandwidth)

    def links(self) -> None:
        """All-to-alls within this rank's node, and over all nodes."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return

        nodes = _ranks_by_node()
        for ranks in nodes:
            group = dist.new_group(ranks)  # every rank makes every group
            if dist.get_rank() in ranks and len(ranks) > 1:
                bandwidth, latency = self._link(group)
                self.rates = replace(self.rates, bandwidth=bandwidth, latency=latency)
        if len(nodes) > 1:
            bandwidth, latency = self._link(None)
            self.rates = replace(self.rates, network_bandwidth=bandwidth, network_latency=latency)

    def _link(self, group: Any) -> tuple[float, float]:
        """Bytes per second and seconds of an all-to-all."""
        ranks = dist.get_world_size(group)
        sent, seconds = [], []
        for nbytes in SENT_BYTES:
            # Of equal parts, as an all-to-all without split sizes takes them.
            elements = max(1, nbytes // (4 * ranks)) * ranks
            numbers = torch.zeros(elements, device=self.device)
            exchange = partial(
                dist.all_to_all_single, torch.empty_like(numbers), numbers, group=group
            )

            slowest = torch.tensor(self._seconds(exchange, exchanges=True), device=self.device)
            # An exchange ends when the slowest rank has received all.
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            sent.append(4.0 * elements * (ranks - 1) / ranks)
            seconds.append(float(slowest))

        return fitted_link(sent, seconds)

    def _step(
        self, width: int, heads: int, size: tuple[int, int, int, int], depth: int
    ) -> tuple[float, ModelFlops]:
        """Seconds of forward and backward of a small STDiT3, and its costs."""
        config: Any = replace(
            resolve_config(REFERENCE_PRESET),
            hidden_size=width,
            num_heads=heads,
            depth=depth,
            caption_channels=width,
            model_max_length=TEXT,
        )
        torch.manual_seed(0)
        with self.device:
            model: Any = model_class(REFERENCE)(config).to(self.dtype)
        latents = (size[0], config.in_channels, *size[1:])

        inputs = step_inputs(model, latents, self.device.type)

        def step() -> None:
            model(**inputs).square().mean().backward()
            model.zero_grad(set_to_none=True)

        return self._seconds(step), ModelFlops.of(model)

    def _seconds(self, function: Callable[[], Any], *, exchanges: bool = False) -> float:
        """The least of several calls after one more: of this process's work, or of an exchange."""
        has_cpu_time = not (exchanges or self.on_gpu) and torch.get_num_threads() == 1
        clock = time.thread_time if has_cpu_time else time.perf_counter
        repeats = EXCHANGES_REPEATED if exchanges else REPEATS
        function()
        taken = []
        for _ in range(repeats):
            self._synchronize()
            start = clock()
            function()
            self._synchronize()
            taken.append(clock() - start)
        return min(taken)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)


def fitted_link(sent: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Bytes per second and latency of a link: the line of the least relative errors."""
    per_byte, latency = np.polyfit(sent, seconds, 1, w=1 / np.asarray(seconds))
    fastest = max(num_bytes / taken for num_bytes, taken in zip(sent, seconds, strict=True))
    # Noise may tilt the line the other way.
    bandwidth = 1 / per_byte if per_byte > 0 else fastest
    return float(bandwidth), max(0.0, float(latency))


def _ranks_by_node() -> list[list[int]]:
    """The ranks of each host, in order."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())
