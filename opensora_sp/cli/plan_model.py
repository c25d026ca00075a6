"""``opensora-sp plan`` of a transformer of diffusers, given by its class or by its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_sp.config.load import parse_override
from opensora_sp.parallel.mesh import check_sp_size

if TYPE_CHECKING:
    from opensora_sp.planner.full_attention import StepEstimate

HEAD = """\
                            MB sent in
trained   checkpointing    forward  backward   GB kept  GB saved   GB peak"""
NOTE = """\
MB sent: by the rank with the most tokens, for a micro-batch. kept: received tensors that stay, so
that recomputation sends nothing (with recompute_communication=True forward is sent again). saved:
activations alive after forward, kept ones included. peak: in bf16 with ZeRO stage 2 and AdamW,
without EMA weights and encoders.
"""
# Of plans of configs.
OTHERS = ("fit", "out", "largest_batch", "gpu", "gpus_per_node")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model of diffusers in place of CONFIG."""
    group = parser.add_argument_group(
        "a transformer of diffusers",
        "in place of CONFIG: a class, such as WanTransformer3DModel, or a folder with config.json",
    )
    add = group.add_argument
    add("--sp-size", type=int, metavar="P", help="GPUs that share a batch (default: all)")
    add("--frames", type=int, default=81, metavar="T", help="of the video (default: 81)")
    sides = "height and width in pixels (default: 480 832)"
    add("--size", type=int, nargs=2, default=(480, 832), metavar="N", help=sides)
    add("--text-length", type=int, default=512, metavar="N", help="tokens (default: 512)")
    add("--lora-rank", type=int, default=16, metavar="R", help="of adapters (default: 16)")


def is_diffusers_model(config: str | None) -> bool:
    """True for the name of a class, and for the folder of a model."""
    if config is None:
        return False
    return config.isidentifier() or (Path(config) / "config.json").is_file()


def run_model_plan(args: argparse.Namespace) -> None:
    """Print a training step of all weights and of adapters, with and without checkpointing."""
    given = [f"--{name.replace('_', '-')}" for name in OTHERS if getattr(args, name) is not None]
    if given or args.gpus is None:
        raise ValueError(
            f"got {args.config} with {', '.join(given) or 'no --gpus'}; expected --gpus, and none "
            "of the options of a config's plan; pass for example --gpus 8 --memory-gb 80"
        )
    ranks = args.sp_size or args.gpus
    if min(args.gpus, ranks, args.frames, *args.size, args.text_length, args.lora_rank) < 1:
        raise ValueError(
            f"got {args.config} with a number below 1; expected numbers from 1; correct it"
        )
    check_sp_size(ranks, args.gpus)

    # Imports torch's models, which other plans need not.
    from opensora_sp.planner.full_attention import Batch, build, estimate

    overrides = map(parse_override, args.cfg_options)
    changes = {".".join(map(str, key)): setting for key, setting in overrides}
    batch = Batch(1, args.frames, *args.size, args.text_length)
    estimates: list[StepEstimate] = []
    for lora, checkpointing in product((None, args.lora_rank), (False, True)):
        model = build(args.config, changes)
        settings = dict(lora=lora, checkpointing=checkpointing)
        estimates.append(estimate(model, batch, gpus=args.gpus, ranks=ranks, **settings))

    if args.json:
        numbers = [dataclasses.asdict(step) for step in estimates]
        sys.stdout.write(json.dumps(numbers, indent=1) + "\n")
        return
    degrees = f"{args.gpus} GPUs = dp_size {args.gpus // ranks} x sp_size {ranks}"
    sys.stdout.write(f"{type(model).__name__}, {degrees}\n{batch}\n\n{HEAD}\n")
    for line in _rows(estimates, args.memory_gb):
        sys.stdout.write(line + "\n")
    sys.stdout.write(NOTE)


def _rows(estimates: list[StepEstimate], memory_gb: float | None) -> Iterator[str]:
    for step in estimates:
        trained = "all" if step.lora is None else f"LoRA {step.lora}"
        blocks = "of blocks" if step.checkpointing else "none"
        fits = memory_gb is None or step.peak.needed <= memory_gb * 1e9
        yield (
            f"{trained:<9} {blocks:<13} {step.forward / 1e6:>10,.1f} {step.backward / 1e6:>9,.1f} "
            f"{step.kept / 1e9:>9.3f} {step.saved / 1e9:>9.3f} {step.peak.total / 1e9:>9.3f}"
            f"{'' if fits else ' too much'}"
        )
