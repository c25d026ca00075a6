"""``opensora-sp plan``: what a config will do on some number of GPUs, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from opensora_sp.common.console import config_arguments
from opensora_sp.common.files import check_writable
from opensora_sp.config import load_either
from opensora_sp.diffusion.cached_steps import describe_steps
from opensora_sp.parallel import closing_process_group
from opensora_sp.planner.calibration import calibrate
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import BatchEstimate, Plan, bucket_estimates, estimator_of
from opensora_sp.runtime.cost_models import write_cost_model
from opensora_sp.runtime.rank_info import versions
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog

from .plan_fit import run_fit
from .plan_model import add_model_options, is_diffusers_model, run_model_plan

COLUMNS = 100
HEAD = "batch of frames x size    tokens ranks          shared by   MB sent  GB peak        s"


def parser() -> argparse.ArgumentParser:
    parser = config_arguments(needs_config=False)
    add = parser.add_argument

    gpus = "processes of the run, one per GPU; with --fit by default one group of sp_size"
    add("--gpus", type=int, metavar="N", help=gpus)
    nodes = "GPUs of a node, to report batches that several nodes share"
    add("--gpus-per-node", type=int, metavar="M", help=nodes)
    memory = "memory of a GPU in GB (1e9 bytes), to report what does not fit"
    add("--memory-gb", type=float, metavar="G", help=memory)
    add("--gpu", metavar="NAME", help="such as H100 or A100-80GB: for its memory and rates")
    add("--json", action="store_true", help="all numbers, in bytes, as JSON")
    fit = (
        "choose batch sizes and gradient checkpointing that fit into a GPU's memory, such as 80GB "
        "or 80GiB, with steps of equal time; write them as a config"
    )
    add("--fit", metavar="MEMORY", help=fit)
    add("--out", metavar="FILE", help="of --fit: the config to write; by default next to CONFIG")
    largest = "of --fit: most clips in a batch (default: 512)"
    add("--largest-batch", type=int, metavar="B", help=largest)
    calibrate = (
        "measure this machine's speed in under a minute and write it for the config key "
        "cost_model; under torchrun its links, too; without CONFIG"
    )
    add("--calibrate", metavar="FILE", help=calibrate)
    add_model_options(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    if args.calibrate is not None:
        run_calibration(args)
        return
    if is_diffusers_model(args.config):
        run_model_plan(args)
        return
    _check_options(args)
    if args.fit is not None:
        run_fit(args)
        return

    cfg, _ = load_either(args.config, args.cfg_options)
    estimator = estimator_of(
        cfg, args.gpus, gpus_per_node=args.gpus_per_node, memory_gb=args.memory_gb, gpu=args.gpu
    )
    estimates = bucket_estimates(estimator)
    if args.json:
        sys.stdout.write(json.dumps(Plan(estimator, list(estimates)).to_dict(), indent=1) + "\n")
        return
    for line in table(estimator, estimates):
        # At once, since a plan of many buckets takes seconds.
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def run_calibration(args: argparse.Namespace) -> None:
    """Measure and print the rates; rank 0 writes the file.

    Raises:
        ValueError: on every rank, if the file cannot be written or ranks cannot join.
    """
    path = Path(args.calibrate)
    with raise_on_all_ranks():
        check_writable(path.parent, "--calibrate")

    store = join_rendezvous()
    with closing_process_group(), Watchdog(store, grace_time=0):
        rates = calibrate(start_process_group(store))

    if os.environ.get("RANK", "0") == "0":
        path.parent.mkdir(parents=True, exist_ok=True)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        write_cost_model(path, rates, dict(device=rates.name, versions=versions(), date=date))
        for name, rate in rates.to_dict().items():
            sys.stdout.write(f"{name}: {rate}\n")
        sys.stdout.write(f"{path}: use it with cost_model={str(path)!r}\n")


def _check_options(args: argparse.Namespace) -> None:
    """Raise ValueError without a config, or for options that do not go together."""
    if args.config is None:
        raise ValueError(
            "got no CONFIG; expected a config to plan; pass its path, or --calibrate FILE alone"
        )
    if args.fit is None and args.gpus is None:
        raise ValueError(
            "got no --gpus; expected the number of processes of the run; pass for example --gpus 8"
        )
    if args.fit is None and (args.out or args.largest_batch is not None):
        raise ValueError(
            "got --out or --largest-batch without --fit; expected the memory to fit into; pass for "
            "example --fit 80GB"
        )


def table(run: RunEstimator, estimates: Iterable[BatchEstimate]) -> Iterator[str]:
    """The plan in lines of at most 100 characters, a bucket's as soon as it is estimated."""
    buckets: list[BatchEstimate] = []
    for estimate in estimates:
        if not buckets:
            yield from [*_heading(run), HEAD]
        buckets.append(estimate)
        yield _row(estimate)

    what = "a micro-batch" if run.training else "a call of the model"
    yield from _wrapped(
        f"MB sent: by a rank for {what}. GB peak: of a rank, {run.kernels_in_words}, without the "
        f"encoders. s: of {what}, by arithmetic at the rates of {run.options.cost_model.name}."
    )
    if len(buckets) == 1:
        yield from _details(buckets[0])


def _heading(run: RunEstimator) -> list[str]:
    """Model, precision and processes of the run."""
    purpose = "training" if run.training else "sampling"
    title = (
        f"{run.name}, {run.sizes.total / 1e6:.1f} M parameters, {purpose} in {run.cfg.precision}, "
        f"{run.num_gpus} GPUs"
    )
    if run.has_one_degree:
        lines = [f"{title} = dp_size {run.num_gpus // run.ranks} x sp_size {run.ranks}"]
        if run.knows_nodes:
            spans = "spans nodes: its exchanges use the network"
            where = spans if run.spans_nodes(run.ranks) else "lies on one node"
            lines.append(f"a group of {run.ranks} ranks {where}")
    else:
        degrees = (
            "sp_size: chosen for each micro-batch; below, as few ranks as its batches fit on. "
            "Communicators of the groups of a rank take about "
            f"{sum(run.communicators) / 1e9:.1f} GB of its GPU"
        )
        lines = [title, *_wrapped(degrees)]
    if run.adapters is not None:
        int8 = f", {run.sizes.int8 / 1e6:.1f} M weights are int8" if run.sizes.int8 else ""
        lines.append(f"LoRA: {run.adapters / 1e6:.1f} M parameters of adapters are trained{int8}")
    return [*lines, ""]


def _row(estimate: BatchEstimate) -> str:
    """Of a batch; sizes are those at 16:9."""
    batch, memory = estimate.bucket, estimate.memory
    height, width = batch.image_size
    size = f"{batch.batch_size} of {batch.num_frames} x {height}x{width}"
    return (
        f"{size:>22} {estimate.shape['tokens']:>9,} {estimate.ranks:>5} {estimate.strategy:>18} "
        f"{estimate.traffic.mean / 1e6:>9,.1f} {memory.peak.total / 1e9:>8.3f} "
        f"{estimate.seconds:>8.3g}{'' if estimate.fits else ' too much'}"
    )


def _details(estimate: BatchEstimate) -> list[str]:
    """Of the only batch: shape, strategy, traffic of each phase, and the parts of memory."""
    memory, kept, peak = estimate.memory, estimate.memory.kept, estimate.memory.peak
    shape = ", ".join(f"{number:,} {name}" for name, number in estimate.shape.items())
    phases = {}
    for phase in ("forward", "recompute", "backward"):
        sent = getattr(estimate.traffic, phase)
        phases[phase] = sum(sent) / len(sent) / 1e6
    parts = dict(
        weights=kept.weights,
        optimizer=kept.master_weights + kept.moments,
        EMA=kept.ema,
        gradients=peak.gradients,
        activations=peak.activations,
    )
    entries = [
        f"batch: {shape}",
        f"{estimate.strategy}: {estimate.reason}",
        "MB sent: "
        + ", ".join(f"{name} {number:,.2f}" for name, number in phases.items())
        + f"; by the busiest rank {estimate.traffic.busiest / 1e6:,.2f}",
        f"GB at the peak, in {peak.moment}: "
        + ", ".join(f"{name} {number / 1e9:.3f}" for name, number in parts.items()),
    ]
    if kept.master_weights:
        entries.append(f"blocks: {memory.describe()}")
    if (whole := estimate.steps) is not None:
        steps = describe_steps(whole.steps) or f"all {len(whole.steps)} are computed"
        entries.append(f"steps: {steps}; together {whole.seconds:.3g} s")
    if estimate.sampling is not None:
        entries.append(f"with the encoders: {estimate.sampling.describe()}")
    return ["", *chain.from_iterable(map(_wrapped, entries))]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False)
