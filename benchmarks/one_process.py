"""Time of a step of a parallelized model on one process; the ratio to the bare model should be 1.

python -m benchmarks one_process --repeats 15

The same operators run (``tests/distributed/test_engine.py`` counts them), so only Python overhead
could cost time. Also measured, on two processes: the check of shapes before each forward.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.processes import on_ranks
from opensora_sp.models import build_model
from opensora_sp.parallel import Options, SequenceMesh, ShardPlan, parallelize
from opensora_sp.parallel.input_check import InputCheck


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)

    print(f"one process, {args.device}, B=1 T=8 S=64 C=288, 4 pairs, forward and backward, in turn")

    steps = [step_of(args.device, parallelized) for parallelized in (False, True)]
    rounds = [[seconds(step) for step in steps] for _ in range(args.repeats + 1)][1:]
    ratios = [parallelized / bare for bare, parallelized in rounds]
    print(
        f"parallelized / bare: median {median(ratios):.3f}, of {min(ratios):.3f} to "
        f"{max(ratios):.3f}"
    )

    taken = on_ranks(2, compare_shapes)
    print(f"comparison of shapes on two processes: median {1e6 * taken:.0f} microseconds a forward")
    return {"ratios": ratios, "comparison_of_shapes_seconds": taken}


def step_of(device: str, parallelized: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = build_model(
        "STDiT3", hidden_size=288, depth=4, num_heads=4, caption_channels=8, model_max_length=4
    )
    model = model.to(device)
    if parallelized:
        parallelize(model, SequenceMesh(1))

    x, y, t = torch.randn(1, 4, 8, 16, 16), torch.randn(1, 1, 4, 8), torch.full((1,), 500.0)
    x, y, t = (z.to(device) for z in (x, y, t))

    def step() -> None:
        model(x, t, y).square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare_shapes() -> float:
    """Median seconds of the check before a forward. Collective."""
    plan = ShardPlan(enter="a", spatial=("b",), temporal=("c",), leave="d", tokens="b t s c")
    check, model = InputCheck(SequenceMesh(2), Options(), plan, list), nn.Identity()
    x = torch.zeros(1, 4, 8, 16, 16)
    inputs = dict(timestep=torch.zeros(1), y=torch.zeros(1, 1, 4, 8), mask=None)
    return median(seconds(lambda: check(model, (x,), inputs)) for _ in range(300))
