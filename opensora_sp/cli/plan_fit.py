"""``opensora-sp plan --fit``: batch sizes that fit into memory, as a table and as a config."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from opensora_sp.config import TrainConfig, dump_config, load_either
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED
from opensora_sp.planner.fit import LARGEST_BATCH, Fit, fit
from opensora_sp.planner.run_plan import check_numbers, rates_of
from opensora_sp.planner.traffic import GPUS_OF_NODE

UNITS = {"": 1e9, "GB": 1e9, "GiB": 1024**3}
COLUMNS = 100
GB_PEAK = (
    "GB peak: of the busiest rank, with room for its largest block in one piece, without the "
    "encoders: lower the bound by what they take. s: predicted for a micro-batch."
)


def run_fit(args: argparse.Namespace) -> None:
    """Choose batch sizes, print them, and write the config that has them.

    Raises:
        ValueError: for a sampling config, a size without a known unit, a file that exists, or a
            bucket of which not one clip fits.
    """
    memory = parse_memory(args.fit)
    out = check_out(args.config, args.out, args.fit)
    cfg = load_either(args.config, args.cfg_options)[0]
    if not isinstance(cfg, TrainConfig):
        raise ValueError(
            "got --fit with a sampling config, whose batch size its prompts decide; expected a "
            "training config; pass one, or leave --fit out for the memory of this one"
        )

    cfg = cfg.model_copy(update={"grad_checkpoint": "auto"})
    num_gpus = args.gpus or _largest_group(cfg)
    largest_batch = LARGEST_BATCH if args.largest_batch is None else args.largest_batch
    check_numbers(gpus=num_gpus, gpus_per_node=args.gpus_per_node, largest_batch=largest_batch)
    result = fit(
        cfg,
        num_gpus,
        memory,
        gpus_per_node=args.gpus_per_node,
        cost_model=rates_of(cfg, args.gpu),
        largest_batch=largest_batch,
        # disable=None: no bar where stderr is no terminal.
        progress=partial(tqdm, desc="plan", unit="bucket", disable=None, leave=False),
    )

    command = shlex.join(["opensora-sp", *args.words]).replace("\n", " ")
    config = dump_config(cfg.with_batch_sizes(result.sizes))
    out.write_text(f"# {command}\n{config}", encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(asdict(result), indent=1) + "\n")
    else:
        sys.stdout.write(f"{table(result, cfg)}\nwritten: {out}\n")


def _largest_group(cfg: TrainConfig) -> int:
    degrees = cfg.sp_size.values() if isinstance(cfg.sp_size, dict) else [cfg.sp_size]
    numbers = [degree for degree in degrees if isinstance(degree, int)]
    return max(numbers, default=GPUS_OF_NODE)


def parse_memory(text: str) -> float:
    """Bytes of ``80GB``, ``80GiB`` or ``80``, which is in GB.

    Raises:
        ValueError: for another unit, or a size that is not positive.
    """
    size = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", text)
    if size is None or size[2] not in UNITS or float(size[1]) == 0:
        raise ValueError(
            f"got --fit {text!r}; expected the memory of one GPU in GB (1e9 bytes) or GiB "
            "(1024^3); write for example 80GB, 80GiB or 80"
        )
    return float(size[1]) * UNITS[size[2]]


def check_out(config: str, out: str | None, memory: str) -> Path:
    """The file for the fitted config: by default next to the config it is made of.

    Raises:
        ValueError: if it exists, or its folder does not.
    """
    source = Path(config)
    size = re.sub(r"\s", "", memory)
    # Configs of the package are not in this folder.
    sibling = source if source.exists() else Path(source.name)
    path = sibling.with_name(f"{source.stem}_fit_{size}.py") if out is None else Path(out)

    if not path.parent.is_dir():
        raise ValueError(f"got --out {path}, whose folder does not exist; expected one; make it")
    if path.exists():
        raise ValueError(
            f"got {path} to write, which exists; expected a new file; pass another --out, or "
            "remove it"
        )
    return path


def table(fit: Fit, cfg: TrainConfig) -> str:
    """The fitted batches, and by how much their times deviate."""
    lines = [
        f"{cfg.model_spec.name} in {fit.memory / 1e9:.4g} GB: micro-batches of {fit.seconds:.3g} s",
        "",
        f"{'bucket':>14} {'batch':>6} {'ranks':>6} {'GB peak':>8} {'s':>8} {'deviation':>10} "
        f"{'decided by':>14}  blocks",
    ]
    for fitted in fit.batches:
        peak = fitted.memory.peak.needed / 1e9
        lines.append(
            f"{fitted.name:>14} {fitted.batch.batch_size:>6} {fitted.ranks:>6} {peak:>8.2f} "
            f"{fitted.seconds:>8.3g} {fitted.deviation:>+10.1%} {fitted.decided_by:>14}  "
            f"{_blocks(fitted.memory.levels)}"
        )

    notes = [GB_PEAK]
    if fit.communicators:
        notes.append(
            f"Communicators of all groups but the largest take {fit.communicators / 1e9:.3g} GB of "
            "the bound."
        )
    for note in notes:
        lines += textwrap.wrap(note, COLUMNS)
    return "\n".join(lines)


def _blocks(levels: list[int]) -> str:
    """The number of blocks that recompute, in few words."""
    recomputed = sum(level < EVERYTHING for level in levels)
    text = f"{recomputed} of {len(levels)} recomputed" if recomputed else "none recomputed"
    offloaded = levels.count(OFFLOADED)
    return f"{text}, {offloaded} inputs on the host" if offloaded else text
