"""Whether ZeRO's overlapped reduction can use a gradient before the stream that makes it is done.

Random models, buckets, groups of parameters and micro-batches are trained by one rank of 64 under
the stub, where ``stream_checker`` looks at the order of all accesses. The order decides, not the
speed, so a run either has a race or has none. Functions that run under the stub begin with ``on_``.
"""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from functools import cache
from itertools import chain, pairwise, product
from typing import Any

import pytest
import torch
from cuda_stub import join, requires_stub, run_on_stub
from stream_checker import StreamChecker
from torch import Tensor, nn

from opensora_sp.parallel import shutdown_process_group
from opensora_sp.plugin._colossalai import colossalai
from opensora_sp.plugin.local_gradients import AccumulatingZeroOptimizer
from opensora_sp.plugin.zero_optimizer import SequenceZeroOptimizer


class Model(nn.Module):
    """Layers of odd sizes, one after the other; some have a second branch on a separate stream."""

    def __init__(self, widths: list[int], aside: set[int]) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList([nn.Linear(m, n) for m, n in pairs])
        self.branches = nn.ModuleDict({str(i): nn.Linear(*pairs[i]) for i in sorted(aside)})
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            # As ZeroOpHook does before an operator reads it.
            colossalai.zero.low_level.zero_hook.wait_all_gather_handle(parameter)

        for i, layer in enumerate(self.layers):
            branch = self._branch(str(i), x)
            x = layer(x)
            if branch is not None:
                torch.cuda.current_stream().wait_stream(self.side)
                branch.record_stream(torch.cuda.current_stream())
                x = x + branch
        return x

    def _branch(self, name: str, x: Tensor) -> Tensor | None:
        if name not in self.branches:
            return None
        self.side.wait_stream(torch.cuda.current_stream())
        x.record_stream(self.side)
        with torch.cuda.stream(self.side):
            return self.branches[name](x)


def on_meaningless_values(base: type) -> type:
    """An optimizer that steps whatever the norm of the gradients is: nothing is computed here."""

    class Optimizer(base):
        def _compute_grad_norm(self, *args: Any, **kwargs: Any) -> float:
            super()._compute_grad_norm(*args, **kwargs)
            return 1.0

    return Optimizer


def train(draw: random.Random, stage: int, aside: bool, optimizer_class: type) -> None:
    """Two or three steps of a random model with a random ZeRO."""
    widths = [draw.randrange(1, 40) for _ in range(draw.randrange(3, 9))]
    dtype = draw.choice([torch.float32, torch.bfloat16])
    layers = set(range(len(widths) - 1))
    own = set(draw.sample(sorted(layers), max(1, len(layers) // 2))) if aside else set()
    model = Model(widths, own).cuda().to(dtype)
    options = dict(
        reduce_bucket_size=draw.choice([1, 200, 2000, 10**6]),
        communication_dtype=draw.choice([None, torch.float32, torch.bfloat16]),
        overlap_allgather=draw.random() < 0.3,
        clip_grad_norm=draw.choice([0.0, 1.0]),
    )
    parameters = list(model.parameters())
    cut = draw.randrange(1, len(parameters))
    groups = (
        [dict(params=parameters[:cut]), dict(params=parameters[cut:])]
        if draw.random() < 0.5
        else parameters
    )
    optimizer = on_meaningless_values(optimizer_class)(
        torch.optim.AdamW(groups),
        overlap_communication=True,
        partition_grad=stage == 2,
        **options,
    )

    micro_batches = draw.randrange(1, 4)
    for _ in range(draw.randrange(2, 4)):
        for i in range(micro_batches):
            held = stage == 1 and i + 1 < micro_batches and draw.random() < 0.5
            with optimizer.no_sync() if held else nullcontext():
                x = torch.randn(draw.randrange(1, 9), widths[0], device="cuda", dtype=dtype)
                optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def on_streams(
    cases: list[dict[str, Any]],
    runs: int,
    world: int = 64,
    optimizer_class: type = SequenceZeroOptimizer,
) -> list[list[list[str]]]:
    """The races of every run of every case, as one rank of ``world``."""
    join(world=world, rank=world // 3)
    checker = StreamChecker()

    found = []
    for case in cases:
        of_case = []
        for seed in range(runs):
            before = len(checker.races)
            with checker:
                train(random.Random(seed), case["stage"], case["aside"], optimizer_class)
            of_case.append(sorted(set(checker.races[before:])))
            torch.cuda.synchronize()
        found.append(of_case)
    # A checker that sees nothing would find nothing: each run has several streams and hundreds of
    # operators.
    assert len(checker.operators) > 2
    assert sum(checker.operators.values()) > 300 * runs * len(cases)
    shutdown_process_group(drain=False)  # the other ranks do not exist
    return found


RUNS, TIMEOUT = 4, 600


@cache
def races_of_cases() -> dict[tuple[int, bool], list[list[str]]]:
    """The races of all cases, by stage and whether there are branches on another stream."""
    keys = list(product((1, 2), (False, True)))
    cases = [dict(stage=stage, aside=aside) for stage, aside in keys]
    races = run_on_stub(on_streams, cases, RUNS, timeout=TIMEOUT).result
    return dict(zip(keys, races, strict=True))


@pytest.mark.slow
@requires_stub
@pytest.mark.parametrize("aside", [False, True], ids=["one stream", "several streams"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_is_neither_read_nor_reused_before_its_streams_have_finished(stage, aside):
    """The controls of the checker are in test_batches_ahead.py."""
    assert races_of_cases()[stage, aside] == [[]] * RUNS


@pytest.mark.slow
@requires_stub
def test_sums_on_this_rank_are_ordered_on_all_streams():
    cases = [dict(stage=2, aside=False), dict(stage=1, aside=True)]
    sound, sound_aside = run_on_stub(
        on_streams, cases, RUNS, 64, AccumulatingZeroOptimizer, timeout=TIMEOUT
    ).result

    # The checker takes whole storages: sums of two parameters lie in one, and are disjoint.
    disjoint = (
        r"add_.Tensor at local_gradients.py:\d+ .* does not wait for add_.Tensor at local_gra"
    )
    races = [race for race in chain.from_iterable(sound_aside) if not re.match(disjoint, race)]
    assert sound == [[]] * RUNS and not races
