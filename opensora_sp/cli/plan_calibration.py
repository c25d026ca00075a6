"""``opensora-sp plan --calibrate``: measure the rates of this machine and write them as a file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from opensora_sp.common.files import check_writable
from opensora_sp.config import load_either
from opensora_sp.parallel import closing_process_group
from opensora_sp.planner.calibration import Calibration, calibrate
from opensora_sp.runtime.cost_model_file import write_cost_model
from opensora_sp.runtime.rank_info import versions
from opensora_sp.runtime.rendezvous import join_rendezvous, raise_on_all_ranks, start_process_group
from opensora_sp.runtime.watchdog import Watchdog


def run_calibration(args: argparse.Namespace) -> None:
    """Measure and print the rates; rank 0 writes the file.

    Raises:
        ValueError: on every rank, if the file cannot be written or ranks cannot join.
    """
    path = Path(args.calibrate)
    with raise_on_all_ranks():
        config = None
        if args.config is not None:
            cfg, _ = load_either(args.config, args.cfg_options)
            config = cfg.model_spec.config
        check_writable(path.parent, "--calibrate")

    store = join_rendezvous()
    with closing_process_group(), Watchdog(store, grace_time=0):
        calibration = calibrate(start_process_group(store), config)

    if os.environ.get("RANK", "0") == "0":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cost_model(path, calibration.model, calibration.facts(versions()))
        sys.stdout.write(f"{table(calibration)}\n{path}: use it with cost_model={str(path)!r}\n")


def table(calibration: Calibration) -> str:
    """The measured rates; of links only where there are several ranks."""
    rates = calibration.model
    lines = [
        f"{rates.name}",
        f"  matrix products     {rates.flops / 1e9:>12,.4g} GFLOP/s",
        f"  attention           {rates.attention_forward / 1e9:>12,.4g} GFLOP/s forward, "
        f"{rates.attention_backward / 1e9:,.4g} backward",
        f"  elementwise kernels {rates.memory_bandwidth / 1e9:>12,.4g} GB/s",
        f"  launches            {rates.launch * 1e6:>12,.4g} us",
    ]
    for spans_nodes in (False, True):
        link = rates.link(spans_nodes=spans_nodes)
        if f"all-to-all {link.name}" in calibration.measured:
            lines.append(
                f"  links {link.name:13} {link.bandwidth / 1e9:>12,.4g} GB/s, "
                f"{link.latency * 1e6:,.4g} us"
            )
    return "\n".join(lines)
