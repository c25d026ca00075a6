"""``opensora-sp plan --calibrate``: measure the rates of this machine and write them as a file."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from opensora_sp.common.files import check_writable
from opensora_sp.parallel import closing_process_group
from opensora_sp.planner.calibration import calibrate
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
