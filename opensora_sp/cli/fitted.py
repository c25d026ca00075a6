"""``opensora-sp plan --fit``: batch sizes that fit into memory, as a table and as a config."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensora_sp.config import InferenceConfig, TrainConfig
    from opensora_sp.planner.fit import Fit, FittedBatch

UNITS = {"": 1e9, "GB": 1e9, "GiB": 1024**3}
COLUMNS = 100


def run_fit(args: argparse.Namespace, progress: Callable[..., Any]) -> None:
    """Choose batch sizes, print them, and write the config that has them.

    Raises:
        ValueError: for a sampling config, a size without a known unit, a file that exists, or a
            bucket of which not one clip fits.
    """
    from opensora_sp.config import dump_config, load_either
    from opensora_sp.planner.batches import with_batch_sizes_in
    from opensora_sp.planner.communicators import GPUS_OF_NODE
    from opensora_sp.planner.fit import LARGEST_BATCH, fit
    from opensora_sp.planner.run_plan import check_numbers, rates_of

    memory = parse_memory(args.fit)
    out = check_out(args.config, args.out, args.fit, overwrite=args.overwrite)
    cfg = _training_config(load_either(args.config, args.cfg_options)[0])
    num_gpus = args.gpus
    if num_gpus is None:
        degrees = cfg.sp_size.values() if isinstance(cfg.sp_size, dict) else [cfg.sp_size]
        numbers = [degree for degree in degrees if isinstance(degree, int)]
        num_gpus = max(numbers, default=GPUS_OF_NODE)
    check_numbers(num_gpus, args.gpus_per_node, None)
    fitted = fit(
        cfg,
        num_gpus,
        memory,
        gpus_per_node=args.gpus_per_node,
        cost_model=rates_of(cfg, args.gpu),
        largest_batch=LARGEST_BATCH if args.largest_batch is None else args.largest_batch,
        progress=progress,
    )

    written = with_batch_sizes_in(cfg, fitted.sizes)
    out.write_text(f"# {_command(args)}\n{dump_config(written)}", encoding="utf-8")
    shown = json.dumps(fitted.to_dict(), indent=1) if args.json else table(fitted, cfg)
    sys.stdout.write(f"{shown}\n" if args.json else f"{shown}\nwritten: {out}\n")


def _training_config(cfg: TrainConfig | InferenceConfig) -> TrainConfig:
    """The config, with levels of gradient checkpointing by shape.

    Raises:
        ValueError: if it is one for sampling.
    """
    from opensora_sp.config import TrainConfig

    if not isinstance(cfg, TrainConfig):
        raise ValueError(
            "got --fit with a sampling config, whose batch size is that of its prompts; expected a "
            "training config; pass one, or leave --fit out for the memory of this one"
        )
    return cfg.model_copy(update={"grad_checkpoint": "auto"})


def parse_memory(text: str) -> float:
    """Bytes of ``80GB``, ``80GiB`` or ``80``, which is in GB.

    Raises:
        ValueError: for another unit, or a size that is not positive.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        if found is not None and found[2] in UNITS and float(found[1]) > 0:
            return float(found[1]) * UNITS[found[2]]
    except ValueError:
        # Several points, or nothing but one.
        pass
    raise ValueError(
        f"got --fit {text!r}; expected the memory of one GPU in GB (1e9 bytes) or GiB (1024^3); "
        "write for example 80GB, 80GiB or 80"
    )


def check_out(config: str, out: str | None, memory: str, *, overwrite: bool) -> Path:
    """The file for the fitted config: by default beside the config it is made of.

    Raises:
        ValueError: if it exists and is not to be overwritten, or its folder does not exist.
    """
    source = Path(config)
    size = re.sub(r"\s", "", memory)
    # Configs of the package are not in this folder.
    beside = source if source.exists() else Path(source.name)
    path = beside.with_name(f"{source.stem}_fit_{size}.py") if out is None else Path(out)

    if not path.parent.is_dir():
        raise ValueError(f"got --out {path}, whose folder does not exist; expected one; make it")
    is_source = path.exists() and source.exists() and path.samefile(source)
    if is_source or (path.exists() and not overwrite):
        advice = "pass another --out" if is_source else "pass another --out, or --overwrite"
        raise ValueError(f"got {path} to write, which exists; expected a new file; {advice}")
    return path


def table(fit: Fit, cfg: TrainConfig) -> str:
    """The fitted batches, and by how much their times deviate."""
    lines = [
        f"{cfg.model_spec.name} in {fit.memory / 1e9:.4g} GB: micro-batches of {fit.seconds:.3g} s",
        "",
        f"{'bucket':>14} {'batch':>6} {'ranks':>6} {'GB peak':>8} {'s':>8} {'deviation':>10} "
        f"{'decided by':>14}  blocks",
    ]
    for one in fit.batches:
        peak = one.memory.peak.needed / 1e9
        lines.append(
            f"{one.name:>14} {one.batch.batch_size:>6} {one.ranks:>6} {peak:>8.2f} "
            f"{one.seconds:>8.3g} {one.deviation:>+10.1%} {one.decided_by:>14}  {_blocks(one)}"
        )

    uneven = [one for one in fit.batches if not one.is_balanced]
    notes = [
        "GB peak: of the busiest rank, with room for its largest block in one piece, without the "
        "encoders: lower the bound by what they take. s: predicted for a micro-batch."
    ]
    if fit.communicators:
        notes.append(
            f"Communicators of groups beside the largest one take {fit.communicators / 1e9:.3g} GB "
            "of the bound."
        )
    if uneven:
        listed = ", ".join(f"{one.name} by {one.deviation:+.0%}" for one in uneven)
        notes.append(
            f"Deviating by more than a tenth and than one clip: {listed}. One clip takes longer "
            "than the batches of others that fit, a larger batch is not allowed, or ranks would "
            "have to share its clips."
        )
    for note in notes:
        lines += textwrap.wrap(note, COLUMNS)
    return "\n".join(lines)


def _blocks(one: FittedBatch) -> str:
    """How many blocks recompute, in few words."""
    from opensora_sp.models.recompute import EVERYTHING, OFFLOADED

    levels = one.memory.levels
    recomputed = sum(level < EVERYTHING for level in levels)
    if not recomputed:
        return "none recomputed"
    text = f"{recomputed} of {len(levels)} recomputed"
    offloaded = levels.count(OFFLOADED)
    return f"{text}, {offloaded} inputs on the host" if offloaded else text


def _command(args: argparse.Namespace) -> str:
    """The command that chooses and writes the same."""
    command = ["opensora-sp", "plan", args.config, "--fit", args.fit]
    for name in ("gpus", "gpus_per_node", "gpu", "largest_batch", "out"):
        number = getattr(args, name)
        if number is not None:
            command += [f"--{name.replace('_', '-')}", str(number)]
    options = ["--cfg-options", *args.cfg_options] if args.cfg_options else []
    return shlex.join(command + options).replace("\n", " ")
