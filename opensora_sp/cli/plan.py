"""``opensora-sp plan``: what a config will do on some number of GPUs, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from opensora_sp.console import config_arguments

if TYPE_CHECKING:
    from opensora_sp.planner import BatchEstimate, Plan
    from opensora_sp.planner.memory import MemoryPeak
    from opensora_sp.planner.step_time import StepTime

HELP = (
    "estimate how ranks share the batches of a config, what they send, memory, and what to change"
)
EXAMPLE = "opensora-sp plan configs/stdit3/train/64x512x512_sp8.py --gpus 8"
COLUMNS = 100
MARGIN = 11
MOMENTS = {"forward": "forward", "backward": "backward", "optimizer step": "step"}
Rows = dict[str, tuple[str, ...]]  # cells by the name of their row


def parser() -> argparse.ArgumentParser:
    parser = config_arguments(HELP, needs_config=False)
    add = parser.add_argument

    add(
        "--gpus",
        type=int,
        metavar="N",
        help="processes of the run, one per GPU; with --fit by default one group of sp_size",
    )
    add(
        "--gpus-per-node",
        type=int,
        metavar="M",
        help="GPUs of a node, to report batches that several nodes share",
    )
    add(
        "--memory-gb",
        type=float,
        metavar="G",
        help="memory of a GPU in GB (1e9 bytes), to report what does not fit",
    )
    add("--gpu", metavar="NAME", help="H100 or H200: predict step time and MFU; sets --memory-gb")
    add("--json", action="store_true", help="all numbers, in bytes, as JSON")
    add(
        "--fit",
        metavar="MEMORY",
        help="choose batch sizes and gradient checkpointing that fit into a GPU's memory, such as "
        "80GB or 80GiB, with steps of equal time; write them as a config",
    )
    add("--out", metavar="FILE", help="of --fit: the config to write; by default beside CONFIG")
    add("--overwrite", action="store_true", help="of --fit: replace the file if it exists")
    add(
        "--largest-batch",
        type=int,
        metavar="B",
        help="of --fit: most clips in a batch (default: 512)",
    )
    add(
        "--calibrate",
        metavar="FILE",
        help="measure this machine's speed in under a minute and write it for the config key "
        "cost_model; under torchrun its links, too; CONFIG may be left out",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from opensora_sp.config import TrainConfig, load_either
    from opensora_sp.planner import plan
    from opensora_sp.planner.run_plan import check_numbers, gpu_of

    from .calibrated import run_calibration
    from .cut import schedule_steps
    from .fitted import run_fit

    # disable=None: no bar where stderr is no terminal.
    progress = partial(
        tqdm, desc="plan", unit="bucket", disable=None, leave=False, dynamic_ncols=True
    )
    if args.calibrate is not None:
        run_calibration(args)
        return
    _check_options(args)
    if args.fit is not None:
        run_fit(args, progress)
        return
    cfg, _ = load_either(args.config, args.cfg_options)
    check_numbers(args.gpus, args.gpus_per_node, args.memory_gb)
    if args.gpu is not None:
        gpu_of(args.gpu)
    steps = None
    if isinstance(cfg, TrainConfig):
        steps = schedule_steps(
            cfg,
            args.gpus,
            args.gpus_per_node,
            gpu=args.gpu,
            memory_gb=args.memory_gb,
            progress=progress,
        )
    result = plan(
        cfg,
        args.gpus,
        gpus_per_node=args.gpus_per_node,
        memory_gb=args.memory_gb,
        gpu=args.gpu,
        degrees=None if steps is None else steps.degrees,
        progress=progress,
    )
    if args.json:
        sys.stdout.write(json.dumps(result.to_dict(), indent=1) + "\n")
        return
    lines = [table(result)]
    if steps is not None:
        lines += ["", *steps.describe()]
    sys.stdout.write("\n".join(lines) + "\n")


def _check_options(args: argparse.Namespace) -> None:
    """Raise ValueError without a config; without ``--fit`` also without ``--gpus``, or with options
    of ``--fit``.
    """
    if args.config is None:
        raise ValueError(
            "got no CONFIG; expected a config to plan; pass its path, or --calibrate FILE alone"
        )
    if args.fit is not None:
        return
    if args.gpus is None:
        raise ValueError(
            "got no --gpus; expected the number of processes of the run; pass for example --gpus 8"
        )
    if args.out or args.overwrite or args.largest_batch is not None:
        raise ValueError(
            "got --out, --overwrite or --largest-batch without --fit; expected the memory to fit "
            "into; pass for example --fit 80GB"
        )


def table(plan: Plan) -> str:
    """The plan in lines of at most 100 characters."""
    lines = [
        f"{plan.model}, {plan.parameters / 1e6:.1f} M parameters, {plan.purpose} in "
        f"{plan.precision}, {plan.num_gpus} GPUs = dp_size {plan.dp_size} x sp_size {plan.sp_size}"
    ]
    if plan.communicators is not None:
        lines[0] = lines[0].partition(" = ")[0]
        degrees = "chosen for each micro-batch; below, on the ranks that its batches run on"
        lines += _entry("sp_size", f"{degrees}. {plan.communicators.describe()}")
    elif plan.spans_nodes is not None:
        where = "lies on one node"
        if plan.spans_nodes:
            where = "spans nodes: its exchanges use the network"
        lines.append(f"a group of {plan.sp_size} ranks {where}")

    if plan.adapters is not None:
        lines.append(f"LoRA: {plan.adapters / 1e6:.1f} M parameters of adapters are trained")
    lines += plan.schedule
    if len(plan.buckets) > 1:
        return "\n".join([*lines, "", *_bucket_lines(plan)])
    return "\n".join([*lines, "", *_single_bucket(plan, plan.buckets[0])])


def _bucket_lines(plan: Plan) -> list[str]:
    """A line for each bucket; sizes are those at 16:9."""
    lines = [
        f"{'batch of frames x size':>22} {'tokens':>9} {'ranks':>5} {'shared by':>18} "
        f"{'busiest':>8} "
        f"{'MB sent':>9} {'GB peak':>8}{'  s/step   MFU' if plan.gpu else ''}"
    ]

    of_each = plan.gpu is not None and plan.communicators is not None
    for one in plan.buckets:
        height, width = one.bucket.image_size
        batch = f"{one.bucket.batch_size} of {one.bucket.num_frames} x {height}x{width}"
        peak = one.memory.configured
        excess = peak.needed > plan.memory_of_step
        lines.append(
            f"{batch:>22} {one.tokens['total']:>9,} {one.ranks:>5} {one.sharing.strategy:>18} "
            f"{one.sharing.imbalance:>+8.1%} {one.traffic.mean / 1e6:>9,.1f} "
            f"{peak.total / 1e9:>8.2f}{_speed(one.time)}{' too much' if excess else ''}"
        )

    return [
        *lines,
        "busiest: work of the busiest rank over the mean. MB sent: by a rank for a micro-batch.",
        "GB peak: of a rank, without the encoders. A bucket_config with one bucket prints more.",
        *(["s/step: of a step whose micro-batches are all of this kind."] if of_each else []),
        *_kernels(plan, *plan.buckets),
    ]


def _speed(time: StepTime | None) -> str:
    return "" if time is None else f" {time.seconds:>7.3g} {time.mfu:>5.0%}"


def _single_bucket(plan: Plan, estimate: BatchEstimate) -> list[str]:
    spec, tokens, sharing = estimate.bucket, estimate.tokens, estimate.sharing
    height, width = spec.image_size
    copies = tokens["samples"] // spec.batch_size
    guided = f", times {copies} for guidance" if copies > 1 else ""
    lines = [
        f"batches of {spec.batch_size} x {spec.num_frames} frames x {height}x{width}{guided}: "
        f"B={tokens['samples']} T={tokens['frames']} S={tokens['patches']}, "
        f"{tokens['total']:,} tokens"
    ]

    lines += _entry("strategy", f"{sharing.strategy}: {sharing.why}")
    for what, sizes in sharing.units.items():
        lines += _entry("rows", f"{what}: {_describe_sizes(sizes)}")
    balance = f"the busiest rank computes {sharing.imbalance:.1%} more than the mean"
    lines += _entry("balance", balance)
    for warning in sharing.idle:
        lines += _entry("warning", warning)

    changing = estimate.tokens_changing_rank
    switched = f"{changing:,} tokens ({changing / tokens['total']:.1%}) change rank at each switch"
    lines += _entry("moved", sharing.moves or switched)

    lines += _sent(plan, estimate) + _memory(estimate) + _time(plan, estimate)
    lines += _kernels(plan, estimate)
    for advice in estimate.advice:
        lines += _entry("try", advice)
    return lines


def _sent(plan: Plan, estimate: BatchEstimate) -> list[str]:
    """Mean over the ranks by phase, and mean and busiest of the whole step."""
    per = "step" if plan.purpose == "training" else "call of the model"
    times = f" of {estimate.micro_batches} micro-batches" if estimate.micro_batches > 1 else ""
    rows: Rows = {f"MB per {per}{times}": ("forward", "recompute", "backward", "mean", "busiest")}

    by_name = {"as configured": estimate.traffic}
    for name, sent in estimate.compared.items():
        if sent != estimate.traffic:
            by_name[f"with {name!r}"] = sent

    for name, sent in by_name.items():
        phases = (sent.forward, sent.recompute, sent.backward)
        means = [sum(phase) / len(phase) for phase in phases]
        numbers = [one * estimate.micro_batches / 1e6 for one in (*means, sent.mean, sent.busiest)]
        rows[name] = tuple(f"{number:,.2f}" for number in numbers)
    return _columns("sent", rows, width=11)


def _memory(estimate: BatchEstimate) -> list[str]:
    memory, state = estimate.memory, estimate.memory.kept
    states = (state.weights, state.master_weights + state.moments, state.ema)
    head = ("peak", "weights", "optimizer", "EMA", "gradients", "activations", "at")
    rows: Rows = {"GB on a rank": head}

    peaks: dict[str, MemoryPeak | None] = {"as configured": memory.plain}
    note = ""
    if memory.checkpointed is not None:
        peaks = {"recomputing all": memory.checkpointed, "recomputing nothing": memory.plain}
        if memory.configured not in peaks.values():
            peaks = {"as configured": memory.configured, **peaks}
        note = f"As configured: {memory.describe()}. "

    for name, peak in peaks.items():
        if peak is not None:
            numbers = (peak.total, *states, peak.gradients, peak.activations)
            cells = [f"{number / 1e9:.3f}" for number in numbers]
            rows[name] = (*cells, MOMENTS[peak.moment])

    if estimate.sampling is None:
        note += "On top come the VAE, the text encoder, and what the allocator loses."
    else:
        note += f"With the encoders: {estimate.sampling.describe()}."
    return _columns("memory", rows, width=9) + _entry("", note)


def _time(plan: Plan, estimate: BatchEstimate) -> list[str]:
    """Step time on the GPU, and how it divides among kinds of operators."""
    time = estimate.time
    if time is None:
        return []
    tokens = estimate.tokens["total"] * estimate.micro_batches * plan.num_gpus / estimate.ranks
    speed = (
        f"{time.seconds:.3g} s a step on {plan.gpu}, {tokens / time.seconds:,.0f} tokens/s, MFU "
        f"{time.mfu:.0%} (predicted, {plan.kernels})"
    )
    shares = []
    for kind, work in time.work.items():
        if work.seconds:
            shares.append(f"{kind} {work.seconds / time.seconds:.0%}")

    lines = _entry("time", speed) + _entry("", "; ".join(shares))
    if time.host_copies.bytes:
        copies = time.host_copies
        text = f"{copies.bytes / 1e9:.3g} GB to the host and back take {copies.seconds:.3g} s"
        lines += _entry("", f"{text}, beside the computation")
    if time.is_launch_bound:
        lines += _entry("", "bound by the host, which launches operators: take larger batches")
    return lines


def _kernels(plan: Plan, *estimates: BatchEstimate) -> list[str]:
    """What computes each kind of attention on the GPU; several batches may differ."""
    from opensora_sp.planner.attention_kernels import describe_kernels

    found: list[str] = []
    for estimate in estimates:
        found += describe_kernels(estimate.attention or {})
    if not found:
        return []

    lines = _entry("kernels", f"on {plan.gpu} with {plan.versions}:")
    for line in dict.fromkeys(found):
        lines += _entry("", line)
    return lines


def _columns(label: str, rows: Rows, width: int) -> list[str]:
    columns = zip(*rows.values(), strict=True)
    widths = [max(width, 1 + max(map(len, column))) for column in columns]

    lines = []
    for name, cells in rows.items():
        numbers = "".join(f"{cell:>{column}}" for cell, column in zip(cells, widths, strict=True))
        lines.append(f"  {label:{MARGIN - 2}}{name:19}{numbers}")
        label = ""
    return lines


def _entry(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=f"  {label:{MARGIN - 2}}",
        subsequent_indent=" " * MARGIN,
        break_long_words=False,
    )


def _describe_sizes(sizes: list[int]) -> str:
    counted = Counter(sizes)
    if len(counted) == 1:
        return f"{sizes[0]:,} on every rank" if len(sizes) > 1 else f"{sizes[0]:,}"

    parts = []
    for size, ranks in sorted(counted.items()):
        parts.append(f"{size:,} on {ranks} rank{'s' * (ranks > 1)}")
    return ", ".join(parts)
