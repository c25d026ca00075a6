"""``opensora-sp plan``: what a config will do on some number of GPUs, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from opensora_sp.console import config_arguments

if TYPE_CHECKING:
    from opensora_sp.planner import Bucket, BucketPlan, Plan

HELP = "say how ranks would share the batches of a config, what they would send, what it takes, what to change"
INSTEAD_OF_TOKENS = {
    "WholeSamples": "no token",
    "SplitHeads": "heads of queries, keys, values and outputs of spatial attention; no whole token",
    "SplitWindows": "heads of queries, keys, values and outputs of windows; no whole token",
    "SplitBoth": "heads of queries, keys, values and outputs of every attention; no whole token",
    "SplitClips": "heads of queries, keys, values and outputs of every attention; no whole token",
    "Ulysses": "heads of queries, keys, values and outputs of every attention; no whole token",
    "SplitGather": "all tokens to all ranks, for every attention",
}
COLUMNS = 100
MARGIN = 11
Cells = list[tuple[str, tuple[str, ...]]]
NAMES = {
    "WholeSamples": "whole samples",
    "SwitchRows": "switch",
    "BranchSwitch": "switch of branches",
    "SplitHeads": "split heads",
    "SplitWindows": "split windows",
    "SplitBoth": "split both",
    "SplitClips": "split clips",
    "Ulysses": "ulysses",
    "SplitGather": "split_gather",
}


def parser() -> argparse.ArgumentParser:
    parser = config_arguments(HELP)
    parser.add_argument(
        "--gpus",
        type=int,
        required=True,
        metavar="N",
        help="processes of the run, one for each GPU",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="M",
        help="to say whether a batch is shared across nodes",
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        metavar="G",
        help="of one GPU, 1e9 bytes, to say what does not fit",
    )
    parser.add_argument("--json", action="store_true", help="all numbers, in bytes, as JSON")
    return parser


def run(args: argparse.Namespace) -> None:
    from opensora_sp.config import load_either
    from opensora_sp.planner import plan

    cfg, _ = load_either(args.config, args.cfg_options)
    made = plan(
        cfg,
        args.gpus,
        gpus_per_node=args.gpus_per_node,
        memory_gb=args.memory_gb,
        progress=_shown,
    )
    sys.stdout.write((json.dumps(made.to_dict(), indent=1) if args.json else table(made)) + "\n")


def _shown(buckets: list[Bucket]) -> Iterable[Bucket]:
    """The buckets, with a bar on a terminal that is gone in the end."""
    from tqdm import tqdm

    # None: nothing where stderr is no terminal
    return tqdm(buckets, desc="plan", unit="bucket", disable=None, leave=False, dynamic_ncols=True)


def table(plan: Plan) -> str:
    """The plan in lines of at most 100 characters."""
    lines = [
        f"{plan.model}, {plan.parameters / 1e6:.1f} M parameters, {plan.purpose} in {plan.precision}, "
        f"{plan.num_gpus} GPUs = dp_size {plan.dp_size} x sp_size {plan.sp_size}"
    ]
    if plan.spans_nodes is not None:
        where = (
            "spans nodes: its exchanges use the network" if plan.spans_nodes else "lies on one node"
        )
        lines.append(f"a group of {plan.sp_size} ranks {where}")
    if len(plan.buckets) > 1:
        return "\n".join([*lines, "", *_lines(plan)])
    for bucket in plan.buckets:
        lines += ["", *_bucket(plan, bucket)]
    return "\n".join(lines)


def _lines(plan: Plan) -> list[str]:
    """A line for each bucket; sizes are those at 16:9."""
    head = f"{'batch of frames x size':>24} {'tokens':>10} {'shared by':>18} {'busiest':>8} {'MB sent':>10} {'GB peak':>8}"
    lines = [head]
    for one in plan.buckets:
        height, width = one.bucket.image_size
        batch = f"{one.bucket.batch_size} of {one.bucket.num_frames} x {height}x{width}"
        peak = one.memory.configured.total / 1e9
        needed = one.memory.configured.needed / 1e9
        fits = " too much" if plan.memory_gb is not None and needed > plan.memory_gb else ""
        lines.append(
            f"{batch:>24} {one.tokens['total']:>10,} {NAMES[one.sharing.mode]:>18} {one.sharing.imbalance:>+8.1%} "
            f"{one.traffic.mean / 1e6:>10,.1f} {peak:>8.2f}{fits}"
        )
    return [
        *lines,
        "busiest: work of the busiest rank over the mean. MB that a rank sends for a micro-batch, and GB of a",
        "rank at its peak beside the encoders, both as configured. With one bucket alone, more is said.",
    ]


def _bucket(plan: Plan, bucket: BucketPlan) -> list[str]:
    shape, tokens = bucket.bucket, bucket.tokens
    height, width = shape.image_size
    guided = ", doubled for guidance" if tokens["samples"] > shape.batch_size else ""
    lines = [
        f"batches of {shape.batch_size} x {shape.num_frames} frames x {height}x{width}{guided}: B={tokens['samples']} "
        f"T={tokens['frames']} S={tokens['patches']}, {tokens['total']:,} tokens"
    ]
    lines += _told("strategy", f"{NAMES[bucket.sharing.mode]}: {bucket.sharing.why}")
    for what, sizes in bucket.sharing.units.items():
        lines += _told("rows", f"{what}: {_held(sizes)}")
    lines += _told(
        "balance", f"the busiest rank computes {bucket.sharing.imbalance:.1%} more than the mean"
    )
    for warning in bucket.sharing.idle:
        lines += _told("warning", warning)
    share = bucket.tokens_changing_rank / tokens["total"]
    moved = f"{bucket.tokens_changing_rank:,} tokens ({share:.1%}) change rank at each switch"
    lines += _told("moved", INSTEAD_OF_TOKENS.get(bucket.sharing.mode, moved))
    return (
        lines
        + _sent(plan, bucket)
        + _memory(plan, bucket)
        + [line for a in bucket.advice for line in _told("try", a)]
    )


def _sent(plan: Plan, bucket: BucketPlan) -> list[str]:
    """Mean over the ranks by phase, and mean and busiest of the whole step."""
    per = "step" if plan.purpose == "training" else "call of the model"
    times = f" of {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    rows: Cells = [
        (f"MB per {per}{times}", ("forward", "recompute", "backward", "mean", "busiest"))
    ]
    others = {
        f"with {name!r}": sent for name, sent in bucket.compared.items() if sent != bucket.traffic
    }
    for name, sent in {"as configured": bucket.traffic, **others}.items():
        phases = [
            sum(phase) / len(phase) for phase in (sent.forward, sent.recompute, sent.backward)
        ]
        numbers = [one * plan.micro_batches / 1e6 for one in (*phases, sent.mean, sent.busiest)]
        rows.append((name, tuple(f"{number:,.2f}" for number in numbers)))
    return _columns("sent", rows, width=11)


def _memory(plan: Plan, bucket: BucketPlan) -> list[str]:
    memory, kept = bucket.memory, bucket.memory.kept
    rows: Cells = [
        ("GB on a rank", ("peak", "weights", "optimizer", "EMA", "gradients", "activations", "at"))
    ]
    states = (kept.weights, kept.masters + kept.moments, kept.ema)
    peaks = {"checkpointing": memory.checkpointed, "no checkpointing": memory.plain}
    if memory.checkpointed is None:
        peaks = {"as configured": memory.plain}
    for name, peak in peaks.items():
        if peak is not None:
            asked = " *" if len(peaks) > 1 and peak is memory.configured else ""
            numbers = (peak.total, *states, peak.gradients, peak.activations)
            rows.append(
                (name + asked, (*(f"{number / 1e9:.3f}" for number in numbers), _AT[peak.moment]))
            )
    note = "* as configured. " if memory.checkpointed is not None else ""
    note += "On top come the VAE, the text encoder, and what the allocator loses."
    return _columns("memory", rows, width=9) + _told("", note)


_AT = {"forward": "forward", "backward": "backward", "optimizer step": "step"}


def _columns(label: str, rows: Cells, width: int) -> list[str]:
    widths = [
        max(width, 1 + max(map(len, column)))
        for column in zip(*(cells for _, cells in rows), strict=True)
    ]
    lines = []
    for place, (name, cells) in enumerate(rows):
        numbers = "".join(f"{cell:>{column}}" for cell, column in zip(cells, widths, strict=True))
        lines.append(f"  {label if place == 0 else '':{MARGIN - 2}}{name:19}{numbers}")
    return lines


def _told(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=f"  {label:{MARGIN - 2}}",
        subsequent_indent=" " * MARGIN,
        break_long_words=False,
    )


def _held(sizes: list[int]) -> str:
    counted = Counter(sizes)
    if len(counted) == 1:
        return f"{sizes[0]:,} on every rank" if len(sizes) > 1 else f"{sizes[0]:,}"
    return ", ".join(
        f"{size:,} on {number} rank{'s' * (number > 1)}" for size, number in sorted(counted.items())
    )
