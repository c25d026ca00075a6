"""What one GPU reaches, measured beside what the planner predicts for it.

python -m benchmarks gpu_report --json report.json
python -m benchmarks gpu_report --quick --doctor     # a minute; also compares results with a CPU's

Three parts: rates (the same as of ``opensora-sp plan --calibrate``); attention of STDiT3-XL/2 by
every kernel, forward, backward and peak memory; forward and backward of STDiT3-XL/2 in bf16, its
MFU and peak memory. The optimizer step and the links are not a part of it. A kernel or a step that
fails is reported with its error, and the rest still runs. The model runs the Triton kernels that a
run would, after they were verified, and predictions are those of these kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_sp.device_verification import choose_kernels
from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.attention import attention
from opensora_sp.models.kernels.fused import Kernels, current_kernels
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.planner.calibration import calibrate
from opensora_sp.planner.memory import recomputed_share
from opensora_sp.planner.seconds import ModelFlops, seconds_of
from opensora_sp.planner.trace import run_step, trace_activations
from opensora_sp.runtime.cost_models import GPUS, SHEETS
from opensora_sp.runtime.doctor.device import Examination, setup_for
from opensora_sp.runtime.doctor.diagnosis import median_seconds
from opensora_sp.runtime.rank_info import versions

MODEL = "STDiT3-XL/2"
DEVICE, BF16 = torch.device("cuda", 0), torch.bfloat16
HEADS, HEAD_WIDTH = 16, 72  # of XL/2


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

Figures = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", choices=list(GPUS), help="whose predictions to compare with (default: by its name)"
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=range(OFFLOADED, EVERYTHING + 1),
        default=0,
        help="what blocks keep for backward: 0 recomputes all (default), -1 also keeps their "
        "inputs on the host",
    )
    parser.add_argument(
        "--kernels",
        choices=get_args(Kernels),
        default="auto",
        help="as in a config; auto: the Triton kernels that this GPU has verified",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile per block")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median")
    parser.add_argument("--quick", action="store_true", help="two pairs of blocks")
    parser.add_argument("--doctor", action="store_true", help="also run doctor --device")


def run(args: argparse.Namespace) -> Figures:
    """Print a table of each part.

    Raises:
        ValueError: without a GPU, or if its predictions are unknown.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "got no GPU that torch sees; expected one to measure; look at the driver and "
            "CUDA_VISIBLE_DEVICES"
        )
    name = torch.cuda.get_device_name(DEVICE)
    gpu = GPUS[args.gpu or known_gpu(name)]

    figures: Figures = {"device": name, "versions": versions()}
    # In plain torch, before kernels are chosen.
    figures["rates"] = list(rates(gpu))
    print_table(f"{name}: rates", figures["rates"])
    # As a run of this model does, before its first step.
    like = SimpleNamespace(config=resolve_config(MODEL))
    figures["kernels"] = choose_kernels(args.kernels, like, dtype=BF16, device=DEVICE)
    figures["attention"] = list(attentions(gpu, args))
    print_table("attention", figures["attention"])
    figures["steps"] = list(steps(gpu, args))
    print_table(f"{MODEL}, forward and backward", figures["steps"])

    if args.doctor:
        examination = Examination(setup_for("cuda"))
        list(examination.run())
        figures["doctor"] = examination.to_dict()
        print(f"doctor --device: {'ok' if figures['doctor']['ok'] else 'FAIL'}")
    return figures


def known_gpu(name: str) -> str:
    """The name in ``GPUS`` of a device."""
    for known in GPUS:
        if known in name:
            return known
    raise ValueError(
        f"got {name!r}, whose speeds are unknown; expected one of {', '.join(GPUS)}; compare with "
        "another GPU's predictions by --gpu"
    )


@dataclass(frozen=True)
class Compared:
    """A measured and a predicted number of one unit, as columns of a table."""

    measured: float
    predicted: float | None

    def columns(self, name: str) -> Figures:
        found: Figures = {f"{name} measured": self.measured}
        if self.predicted is not None:
            found[f"{name} predicted"] = self.predicted
            found[f"{name} measured/predicted"] = self.measured / self.predicted
        return found


def rates(gpu: CostModel) -> Iterator[Figures]:
    """The rates that this GPU reaches in a transformer, and those that the planner takes."""
    measured = calibrate(DEVICE)
    units = {
        "memory_bandwidth": ("GB/s", 1e9),
        "flops": ("TFLOP/s", 1e12),
        "attention_forward": ("TFLOP/s", 1e12),
        "attention_backward": ("TFLOP/s", 1e12),
    }
    for name, (unit, scale) in units.items():
        rate = Compared(getattr(measured, name) / scale, getattr(gpu, name) / scale)
        yield {"rate": name, "unit": unit, **rate.columns("rate")}


def attentions(gpu: CostModel, args: argparse.Namespace) -> Iterator[Figures]:
    """Spatial and temporal attention of each shape, by each kernel."""
    for shape in SHAPES:
        rows = {
            "spatial": (shape.batch * shape.frames, shape.patches),
            "temporal": (shape.batch * shape.patches, shape.frames),
        }
        for kind, (num_rows, length) in rows.items():
            for kernel, attend in kernels().items():
                row = {"shape": shape.name, "attention": kind, "kernel": kernel}
                measure = partial(attention_figures, attend, num_rows, length, gpu, args.repeats)
                yield row | figures_or_error(measure)


def kernels() -> dict[str, Attend]:
    """The backends of this package that a GPU may have, and each of torch's kernels alone."""
    found: dict[str, Attend] = {}
    for name in ("auto", "short_rows", "flash", "flash3"):
        found[name] = partial(attention, backend=name)
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        found[f"torch {backend}"] = partial(attend_by_torch, getattr(SDPBackend, backend))
    return found


def attend_by_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows ``[R, L, H, D]`` by one of torch's kernels."""
    with sdpa_kernel(backend):
        heads_first = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def attention_figures(
    attend: Attend, rows: int, length: int, gpu: CostModel, repeats: int
) -> Figures:
    """Milliseconds of forward and backward, and the peak of a pass beside its inputs in GB."""
    size = (rows, length, HEADS, HEAD_WIDTH)
    inputs = [torch.randn(size, device=DEVICE, dtype=BF16).requires_grad_() for _ in range(3)]
    gradient = torch.randn(size, device=DEVICE, dtype=BF16)
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)

    output = attend(*inputs)
    torch.autograd.grad(output, inputs, gradient)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before

    output = attend(*inputs)
    forward = median_seconds(lambda: attend(*inputs), repeats, DEVICE)
    backward = median_seconds(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True), repeats, DEVICE
    )
    figures: Figures = {"peak GB measured": peak / 1e9}
    for name, seconds in (("forward", forward), ("backward", backward)):
        planned = gpu.attention(
            rows * HEADS, length, length, HEAD_WIDTH, backward=name == "backward"
        )
        figures |= Compared(1e3 * seconds, 1e3 * planned).columns(f"{name} ms")
    return figures


def steps(gpu: CostModel, args: argparse.Namespace) -> Iterator[Figures]:
    """Forward and backward of each shape, as the planner traces them."""
    config = resolve_config(MODEL)
    if args.quick:
        config = dataclasses.replace(config, depth=2)
    for shape in SHAPES:
        measure = partial(step_figures, config, shape, gpu, args)
        yield {"shape": shape.name, "B": shape.batch, **figures_or_error(measure)}


def step_figures(config: Any, shape: Shape, gpu: CostModel, args: argparse.Namespace) -> Figures:
    """Tokens/s, milliseconds, MFU, and the peak of weights and activations in GB."""
    with DEVICE:
        model: Any = build_model("STDiT3", **dataclasses.asdict(config)).to(BF16)
    model.set_grad_checkpoint([args.level] * len(model.transformer_blocks))
    parallelize(model, SequenceMesh(1))
    if args.compile:
        compile_blocks(model)
    weights = sum(
        one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers())
    )

    def step() -> None:
        for _ in run_step(model, shape.latents, ranks=1, training=True, device="cuda"):
            pass

    torch.cuda.reset_peak_memory_stats(DEVICE)
    seconds = median_seconds(step, args.repeats, DEVICE)
    peak = torch.cuda.max_memory_allocated(DEVICE)

    text = float(shape.batch * config.model_max_length)
    flops = ModelFlops.of(model).step(shape.latents, text)
    planned_seconds, planned_activations = plan_of(config, shape, gpu, args.level)
    time = Compared(1e3 * seconds, 1e3 * planned_seconds)
    peak_flops = 1e12 * SHEETS[gpu.name].tflops
    mfu = Compared(flops / seconds / peak_flops, flops / planned_seconds / peak_flops)
    memory = Compared(peak / 1e9, (weights + planned_activations) / 1e9)
    tokens = shape.batch * shape.frames * shape.patches
    columns = time.columns("ms") | mfu.columns("MFU") | memory.columns("peak GB")
    return {"tokens/s": tokens / seconds} | columns


def plan_of(config: Any, shape: Shape, gpu: CostModel, level: int) -> tuple[float, float]:
    """Predicted seconds of a pass, without the optimizer step, and bytes of its activations."""
    seconds = seconds_of(
        BatchShape.of(config, shape.batch, shape.latents[2:]),
        Options(cost_model=gpu),
        1,
        model=ModelFlops.planned("STDiT3", config),
        element_size=BF16.itemsize,
        recomputed=recomputed_share([level]),
    )
    activations = trace_activations(
        "STDiT3",
        config,
        shape.latents,
        level=level,
        training=True,
        options=Options(),
        ranks=1,
        dtype=BF16,
        kernels=current_kernels(),
    )
    return seconds, activations.at(config.depth)


def figures_or_error(measure: Callable[[], Figures]) -> Figures:
    """What ``measure`` returns, or the first line of its error: kernels may raise anything."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    finally:
        torch.cuda.empty_cache()


def print_table(title: str, rows: list[Figures]) -> None:
    """A Markdown table with the columns of all rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n{title}\n\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print(f"| {' | '.join(cell(row.get(column, '')) for column in columns)} |", flush=True)


def cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
