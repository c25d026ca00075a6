"""Predicted seconds of micro-batches: counts of operators, and how seconds grow with work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_sp.models.registry import CLASSES, resolve_config
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CPU, H100, CostModel
from opensora_sp.planner.seconds import ModelFlops, seconds_of
from opensora_sp.planner.trace import small_meta_model, step_inputs
from opensora_sp.runtime.cost_models import PRESETS

Latents = tuple[int, int, int, int, int]
XL2: Any = dataclasses.replace(resolve_config("STDiT3-XL/2"), depth=4)
COSTS = ModelFlops.planned("STDiT3", XL2)
# ``(B, c, frames, height, width)``: an image, many images, clips short and long.
IMAGE, IMAGES, SHORT, LONG = (
    (1, 4, 1, 64, 64),
    (20, 4, 1, 64, 64),
    (4, 4, 15, 40, 40),
    (1, 4, 32, 64, 64),
)


def seconds(
    latents: Latents, ranks: int, cost_model: CostModel = H100, config: Any = XL2, **options: Any
) -> float:
    in_group = Options(cost_model=cost_model, spans_nodes=options.pop("spans_nodes", False))
    options = {"model": COSTS, "element_size": 2, **options}
    shape = BatchShape.of(config, latents[0], latents[2:])
    return seconds_of(shape, in_group, ranks, **options)


class PassCounter(TorchDispatchMode):
    """Operators that write memory, and bytes that those beside products and attention move."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.bytes = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = aliases and all(alias and not alias.is_write for alias in aliases)
        name = func._schema.name
        if not is_view and not any(part in name for part in ("empty", "unsafe_view", "set_")):
            self.operators += 1
            if not any(part in name for part in ("mm", "attention")):
                tensors = {
                    (one.untyped_storage()._cdata, one.storage_offset(), one.shape): one
                    for one in tree_leaves((args, result))
                    if isinstance(one, torch.Tensor)
                }
                self.bytes += sum(map(numbers_of, tensors.values()))
        return result


def numbers_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, whose expanded dimensions repeat them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


@pytest.mark.parametrize("name", CLASSES)
def test_counts_of_a_pass_are_those_of_the_operators(name: str) -> None:
    """What a further pair of blocks adds on meta tensors, where one activation is 2 B C a token."""
    latents = (1, 4, 16, 32, 32)
    counted = {}
    for depth in (1, 2, 3):  # the first also makes tables that later ones share
        config: Any = dataclasses.replace(resolve_config(f"{name}-XL/2"), depth=depth)
        if name == "STDiT":
            config = dataclasses.replace(config, input_size=latents[2:])
        model = small_meta_model(name, config, depth, torch.bfloat16)
        parallelize(model, SequenceMesh.imagined(1, 0))
        inputs = step_inputs(model, latents, "meta")
        with PassCounter() as forward:
            output = model(**inputs, output="full")
        with PassCounter() as backward:
            output.square().mean().backward()
        passes = [(one.operators, one.bytes) for one in (forward, backward)]
        counted[depth] = passes

    activation = 2 * 16 * 16 * 16 * 1152
    of_pair = np.subtract(counted[3], counted[2])
    planned = [(one.operators, one.activations * activation) for one in CLASSES[name].pass_counts]
    # A gather or copy reads less than its arguments hold, and so moves less in forward.
    assert of_pair == pytest.approx(np.array(planned), rel=0.45)
    assert of_pair.sum(axis=0) == pytest.approx(np.sum(planned, axis=0), rel=0.08)


@pytest.mark.parametrize("preset", PRESETS)
def test_more_work_takes_longer(preset):
    rates = PRESETS[preset]
    # None is bound by launches, which grow with nothing.
    grown = ((1, 4, 16, 64, 64), (2, 4, 16, 64, 64), (2, 4, 32, 64, 64), (2, 4, 32, 96, 96))
    for ranks in (1, 2, 4):
        times = [seconds(latents, ranks, rates) for latents in grown]
        assert times == sorted(times) and times[0] < times[-1]

    assert seconds(LONG, 1, rates) < seconds(LONG, 1, rates, recomputed=0.5)
    assert seconds(LONG, 1, rates, training=False) < seconds(LONG, 1, rates) / 2


def test_more_ranks_help_large_batches_and_not_small_ones():
    assert seconds(LONG, 8) < seconds(LONG, 4) < seconds(LONG, 2) < seconds(LONG, 1)
    # An image is bound by launches, which each rank has; exchanges come on top.
    assert seconds(IMAGE, 8) > seconds(IMAGE, 1)
    # Where ranks divide the batch, nothing is sent, so a slower link changes nothing.
    slow = dataclasses.replace(H100, bandwidth=1e9)
    assert seconds(SHORT, 4, slow) == seconds(SHORT, 4)
    assert seconds(LONG, 4, slow) > seconds(LONG, 4)


def test_the_busiest_rank_counts():
    """Of 5 frames on 4 ranks one holds two, as each does of 8: in blocks that never leave them."""
    spatial = dataclasses.replace(XL2, skip_temporal=True)
    five, eight, four = (
        seconds((1, 4, frames, 96, 96), 4, config=spatial, recomputed=1.0) for frames in (5, 8, 4)
    )
    assert five == pytest.approx(eight) and five > 1.2 * four


def test_groups_that_span_nodes_take_longer():
    assert seconds(LONG, 8, spans_nodes=True) > seconds(LONG, 8)
    assert seconds(SHORT, 4, spans_nodes=True) == seconds(SHORT, 4)


def test_a_cpu_launches_and_computes_in_turn():
    assert CPU.with_launches(1.0, 1000) == 1.0 + 1000 * CPU.launch
    assert H100.with_launches(1.0, 1000) == 1.0
    assert H100.with_launches(0.0, 1000) == 1000 * H100.launch
