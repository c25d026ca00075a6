"""Roofline of a training step per region: counted FLOPs and bytes, least and predicted time.

python -m benchmarks roofline                            # the table of docs/benchmarks.md
python -m benchmarks roofline --gpu H200 --plot roofline.png

Nothing is measured. The operators of a forward and backward pass of STDiT3-XL/2 without
recomputation, with Triton kernels, are counted on meta tensors; the optimizer step and the links
are arithmetic (``opensora_sp/planner/step_time.py``). The floor is the time at the data sheet's
rates: for each region the longer of its FLOPs and its bytes. The prediction takes the rates that
kernels reach, and at least 2 microseconds for each of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.planner.operators import Work
from opensora_sp.planner.step_time import EXCHANGES, OPTIMIZER, ZERO, StepTime, predict_step

MODEL = "STDiT3-XL/2"
SP_SIZES = (1, 8)

# Bytes per second: of memory by the data sheets, and of NVLink 4 in one direction.
MEMORY_PEAK = {"H100": 3.35e12, "H200": 4.8e12}
LINKS_PEAK = 450e9
ON_LINKS = (EXCHANGES, ZERO)


@dataclass(frozen=True)
class Shape:
    """A micro-batch of ``batch`` clips of ``frames`` latent frames of ``patches`` patches."""

    name: str
    frames: int
    patches: int
    batch: int

    @property
    def latents(self) -> tuple[int, ...]:
        """``(B, c, frames, height, width)``; patches are 2 x 2 latent pixels."""
        sides = range(1, math.isqrt(self.patches) + 1)
        rows = max(side for side in sides if self.patches % side == 0)
        return self.batch, 4, self.frames, 2 * rows, 2 * self.patches // rows


SHAPES = (
    Shape("16x256x256", 16, 256, 16),
    Shape("64x512x512", 64, 1024, 1),
    Shape("480p x 51 frames", 15, 1590, 5),
    Shape("720p x 102 frames", 30, 3600, 1),
)


@dataclass(frozen=True)
class Row:
    """One region of a step of the busiest rank; seconds are predicted."""

    region: str
    flops: float
    bytes: float
    operators: float
    floor: float
    seconds: float


@dataclass(frozen=True)
class Step:
    """A step of a shape on ``sp_size`` GPUs."""

    gpu: str
    shape: Shape
    sp_size: int
    rows: list[Row]
    floor: float
    seconds: float
    mfu: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=list(GPUS), nargs="+", default=list(GPUS))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of the first GPU")


def run(args: argparse.Namespace) -> dict[str, Any]:
    steps = [step for name in args.gpu for step in steps_on(name)]
    print(steps_table(steps))
    print()
    print(regions_table(steps))

    if args.plot is not None:
        plot([step for step in steps if step.gpu == args.gpu[0]], args.plot)
    return {"model": MODEL, "steps": [asdict(step) for step in steps]}


def steps_on(gpu: str) -> Iterator[Step]:
    for shape in SHAPES:
        for sp_size in SP_SIZES:
            yield step_of(gpu, shape, sp_size)


def step_of(gpu: str, shape: Shape, sp_size: int) -> Step:
    predicted = predicted_step(gpu, shape, sp_size)
    rows = []
    for region, work in predicted.work.items():
        if work.bytes:
            floor = floor_of(region, work, gpu)
            rows.append(Row(region, work.flops, work.bytes, work.operators, floor, work.seconds))

    floor = sum(row.floor for row in rows)
    return Step(gpu, shape, sp_size, rows, floor, predicted.seconds, predicted.mfu)


def predicted_step(gpu: str, shape: Shape, sp_size: int) -> StepTime:
    """Of one group of ``sp_size`` ranks alone, over which ZeRO shards the optimizer."""
    return predict_step(
        "STDiT3",
        resolve_config(MODEL),
        shape.latents,
        gpu=GPUS[gpu],
        options=Options(),
        ranks=sp_size,
        world=sp_size,
        dtype=torch.bfloat16,
        kernels="triton",
    )


def floor_of(region: str, work: Work, gpu: str) -> float:
    """The least seconds of a region: nothing is lost, and computing hides moving or vice versa."""
    if region in ON_LINKS:
        return work.bytes / LINKS_PEAK
    return max(work.flops / GPUS[gpu].peak, work.bytes / MEMORY_PEAK[gpu])


def regions_table(steps: list[Step]) -> str:
    """Markdown; counts are those of any GPU, so each GPU adds two columns of times."""
    gpus = list(dict.fromkeys(step.gpu for step in steps))
    times = [f"{gpu} floor ms | {gpu} predicted ms" for gpu in gpus]
    lines = [f"| shape | sp_size | region | TFLOP | GB | operators | {' | '.join(times)} |"]
    lines.append("|---" * (6 + 2 * len(gpus)) + "|")

    for step in steps:
        if step.gpu != gpus[0]:
            continue
        alike = [one for one in steps if (one.shape, one.sp_size) == (step.shape, step.sp_size)]
        for rows in zip(*(one.rows for one in alike), strict=True):
            row = rows[0]
            cells = [step.shape.name, f"{step.sp_size}", row.region, f"{row.flops / 1e12:.1f}"]
            cells += [f"{row.bytes / 1e9:.1f}", f"{row.operators:,.0f}"]
            for one in rows:
                cells += [f"{1e3 * one.floor:.1f}", f"{1e3 * one.seconds:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(steps: list[Step]) -> str:
    """Markdown: whole steps."""
    lines = ["| GPU | shape | B | sp_size | floor ms | predicted ms | bound by | MFU |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for step in steps:
        launches = step.seconds > sum(row.seconds for row in step.rows)
        cells = [step.gpu, step.shape.name, f"{step.shape.batch}", f"{step.sp_size}"]
        cells += [f"{1e3 * step.floor:.0f}", f"{1e3 * step.seconds:.0f}"]
        cells += ["launches" if launches else "kernels", f"{step.mfu:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(steps: list[Step], file: Path) -> None:
    """FLOP/s over FLOPs per byte of each region, below the roof of the GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpu = steps[0].gpu
    peak, bandwidth = GPUS[gpu].peak, MEMORY_PEAK[gpu]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [0.1, peak / bandwidth, 1e4]
    roof = [min(peak, bandwidth * intensity) / 1e12 for intensity in intensities]
    axes.loglog(intensities, roof, color="black", label=f"{gpu}, data sheet")

    rows: list[Row] = []
    for step in steps:
        rows += [row for row in step.rows if row.flops and row.region != OPTIMIZER]
    for region in dict.fromkeys(row.region for row in rows):
        alike = [row for row in rows if row.region == region]
        x = [row.flops / row.bytes for row in alike]
        axes.scatter(x, [row.flops / row.seconds / 1e12 for row in alike], label=region, s=18)

    axes.set_xlabel("FLOPs per byte (counted)")
    axes.set_ylabel("TFLOP/s (predicted)")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
