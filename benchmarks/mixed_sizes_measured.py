"""Throughput of training on mixed sizes on a slow link: a degree per batch against a fixed one.

python -m benchmarks mixed_sizes_measured

Takes about five minutes, and fails if a limit is missed.

Two ranks of the real trainer (reading, encoding, exchanges, reduction of gradients, optimizer), in
two network namespaces as in ``slow_link``. The bandwidth is the one at which ``sp_size=2`` spends
half of its time in exchanges of tokens. Of four buckets with odd batch sizes, one does not fit into
the memory that a rank is given. The cost model is measured on the slowed link, as
``opensora-sp plan --calibrate`` does it. Each case trains whole epochs of the same micro-batches,
in turn; ratios are those within a round.

On four ranks, which share the cores, exchanges, bytes and clips are counted alone.

Needs root and iproute2 (``ip``, ``tc``); exits with 2 without them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from benchmarks.processes import join_ranks, on_ranks
from benchmarks.slow_link import (
    RANKS,
    STORE,
    Clock,
    add_link_options,
    limit_link,
    on_slow_link,
)
from opensora_sp.config import load_train_config
from opensora_sp.data.loader import StepBatches
from opensora_sp.data.manifest import Entry, write_manifest
from opensora_sp.data.video import write_video
from opensora_sp.parallel import CommLedger, shutdown_process_group
from opensora_sp.parallel.communication import listening
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.planner.calibration import calibrate
from opensora_sp.planner.memory import memory_for
from opensora_sp.runtime.cost_models import write_cost_model
from opensora_sp.training.preflight import preflight
from opensora_sp.training.trainer import Trainer

# Frames of a clip: clips of a batch, batches of an epoch. The longest does not fit into MEMORY.
BUCKETS = {1: (3, 7), 4: (1, 10), 8: (1, 5), 16: (1, 2)}
MEMORY = memory_for(70e6)
HEIGHT, WIDTH = 144, 256
CONFIG = """
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=12)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=8, model_max_length=12, hidden_size=64,
    depth=2, num_heads=4, pred_sigma=False,
)
bucket_config = {{"144p": {buckets}}}
dataset = dict(type="VariableVideoText", manifest={manifest!r}, transform="resize_random_crop")
precision = "fp32"
grad_checkpoint = "auto"
micro_batches_per_step = 8
max_steps = 100_000
optimizer = dict(lr=1e-4)
num_workers = 0
"""
FIXED, AUTO = "sp_size=2, mixed", "sp_size='auto', mixed"
FIXED_BY_COST, AUTO_BY_COST = "sp_size=2, by_cost", "sp_size='auto', by_cost"
CASES = {
    FIXED: ["sp_size=2", "batch_order=mixed"],
    FIXED_BY_COST: ["sp_size=2", "batch_order=by_cost"],
    AUTO: ["sp_size=auto", "batch_order=mixed"],
    AUTO_BY_COST: ["sp_size=auto", "batch_order=by_cost"],
}
# Without those of features and gradients, which all cases send.
EXCHANGES = ("switch", "heads", "branch", "tokens")
AUTO_TO_FIXED, MIXED_TO_BY_COST = 1.3, 0.97


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.rank is not None:
        return work(args)

    figures = on_slow_link("mixed_sizes_measured")
    with TemporaryDirectory() as name:
        write_set(Path(name))
        on_ranks(4, count, Path(name), figures["cost_model"])
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds in which every case trains an epoch"
    )
    add_link_options(parser)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Run one rank of two; both know the times of the slower one."""
    join_ranks(args.rank, RANKS, STORE)
    with shared_folder() as folder:
        if args.rank == 0:
            write_set(folder)
        dist.barrier()

        rate = rate_of_equal_parts(Run(folder, "before calibration", CASES[FIXED]))
        model = calibrate(torch.device("cpu"))
        say(
            f"calibrated: {model.flops / 1e9:.0f} GFLOP/s, link "
            f"{8 * model.bandwidth / 1e6:.1f} Mbit/s, latency {1e3 * model.latency:.2f} ms"
        )
        save_cost_model(folder, model.to_dict())
        rounds = time_all(folder, args.repeats)

    shutdown_process_group()
    limits = compare(rounds) if args.rank == 0 else []
    kept = args.no_limits or all(one["kept"] for one in limits)
    return {
        "samples_per_second": rounds,
        "mbit_per_second": rate / 1e6,
        "cost_model": model.to_dict(),
        "limits": limits,
        "kept": kept,
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that rank 0 makes and removes. Collective."""
    with TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names, src=0)
        yield Path(names[0])
        dist.barrier()


def write_set(folder: Path) -> None:
    """Random clips, of which each bucket makes whole batches alone."""
    draws, entries = np.random.default_rng(0), []
    for of_bucket, (batch_size, batches) in BUCKETS.items():
        # Videos of a bucket are longer than its clips.
        frames = of_bucket + (of_bucket > 1)
        for number in range(batch_size * batches):
            video = draws.integers(0, 255, (frames, HEIGHT // 16, WIDTH // 16, 3), dtype=np.uint8)
            video = video.repeat(16, axis=1).repeat(16, axis=2)
            path = folder / f"{frames}-{number}.{'png' if frames == 1 else 'mp4'}"
            if frames == 1:
                Image.fromarray(video[0]).save(path)
            else:
                write_video(path, video, fps=8)
            entries.append(Entry(Path(path.name), f"clip {number}", frames, HEIGHT, WIDTH, 8.0))
    write_manifest(folder / "clips.jsonl", entries)

    buckets = {frames: (1.0, batch_size) for frames, (batch_size, _) in BUCKETS.items()}
    text = CONFIG.format(buckets=buckets, manifest=str(folder / "clips.jsonl"))
    (folder / "config.py").write_text(text)


def save_cost_model(folder: Path, model: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        facts = dict(device="CPU", versions={}, date="")
        write_cost_model(folder / "link.json", CostModel.from_dict(model), facts)
    dist.barrier()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


@dataclass
class Epoch:
    """An epoch of one case; seconds of the slower rank, counts of this one.

    ``waited`` are the seconds of this rank in exchanges of tokens, ``own_clips`` the clips of its
    micro-batches, alone or with others.
    """

    seconds: float
    clips: int
    own_clips: int
    waited: float
    counter: CommLedger

    @property
    def sent(self) -> int:
        """Bytes of tokens."""
        return sum(one for key, one in self.counter.bytes.items() if key[0] in EXCHANGES)

    @property
    def calls(self) -> int:
        return sum(one for key, one in self.counter.calls.items() if key[0] in EXCHANGES)


class Run:
    """A trainer whose epochs are timed one by one."""

    def __init__(self, folder: Path, name: str, options: list[str]) -> None:
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        outputs = folder / name.replace("'", "")
        cfg = load_train_config(folder / "config.py", [*options, f"outputs={outputs}"])
        dataset, _ = preflight(cfg, None)
        # A CPU's memory belongs to all ranks of a host; here each has its own.
        memory = "opensora_sp.training.memory_fit.memory_of"
        with mock.patch(memory, return_value=MEMORY):
            self.trainer = Trainer(cfg, dataset, None, torch.device("cpu"))
        self.batches = iter(self.trainer.loader)
        self.step, self.waited = 0, 0.0

    def epoch(self) -> Epoch:
        """Train one epoch. Collective."""
        clips = own_clips = 0
        self.waited = 0.0
        with Clock() as clock, CommLedger() as counter, listening(self._listener):
            for _ in range(int(self.trainer.plan.steps_per_epoch)):
                step = next(self.batches)
                loaded = list(step.loaded)
                batches = StepBatches(step.micro_batches, iter(loaded))
                self.trainer.step.run(self.step, batches).read()

                self.step += 1
                clips += sum(len(micro_batch.ids) for micro_batch in step.micro_batches)
                own_clips += sum(len(one.micro_batch.ids) for one in loaded)
        return Epoch(clock.seconds, clips, own_clips, self.waited, counter)

    @contextmanager
    def _listener(self, kind: str, backward: bool, device: torch.device) -> Iterator[None]:
        since = time.perf_counter()
        yield
        if kind in EXCHANGES:
            self.waited += time.perf_counter() - since


def rate_of_equal_parts(run: Run) -> float:
    """Limit the link so that an epoch spends half of its time in exchanges; bit/s."""
    limit_link(None)
    run.epoch()
    free = run.epoch()
    rate = 8 * free.sent / (free.seconds - free.waited)
    for attempt in range(3):
        limit_link(rate)
        slowed = run.epoch()
        waited = torch.tensor(slowed.waited, dtype=torch.float64)
        dist.all_reduce(waited)
        share = float(waited) / RANKS / slowed.seconds
        say(
            f"{FIXED} at {rate / 1e6:.1f} Mbit/s: an epoch of {slowed.seconds:.1f} s, of which "
            f"{share:.0%} in exchanges; {free.seconds:.1f} s without a limit"
        )
        if abs(share - 0.5) < 0.03 or attempt == 2:
            break
        rate *= share / (1 - share)
    return rate


def time_all(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Clips per second of each case in each round; cases take turns. Collective."""
    model = f"cost_model={folder / 'link.json'}"
    runs = {name: Run(folder, name, [*options, model]) for name, options in CASES.items()}
    counted = {name: one.epoch() for name, one in runs.items()}
    report_counts(counted)
    least = runs[AUTO].trainer.rank_batches.seconds.least_ranks
    say(f"fewest ranks by the bound of memory: {dict(least)}")

    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, one in runs.items():
            epoch = one.epoch()
            rates[name].append(epoch.clips / epoch.seconds)
        say("clips/s: " + ", ".join(f"{name} {of[-1]:.2f}" for name, of in rates.items()))
    return rates


def report_counts(epochs: dict[str, Epoch]) -> None:
    """Counts of an epoch on each rank. Collective."""
    say(f"{'case':26} {'exchanges':>18} {'MB sent':>22} {'clips':>16}   rank by rank")
    for name, one in epochs.items():
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (one.calls, f"{one.sent / 1e6:.1f}", one.own_clips))
        calls, sent, clips = (" ".join(map(str, of)) for of in zip(*ranks, strict=True))
        say(f"{name:26} {calls:>18} {sent:>22} {clips:>16}")


def compare(rounds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Ratios within rounds, by their medians against the limits."""
    fixed = max(rounds[FIXED], rounds[FIXED_BY_COST], key=median)
    limits = []
    for name, ours, theirs, limit in (
        ("sp_size='auto' / sp_size=2, the better order", rounds[AUTO], fixed, AUTO_TO_FIXED),
        ("mixed / by_cost, sp_size='auto'", rounds[AUTO], rounds[AUTO_BY_COST], MIXED_TO_BY_COST),
    ):
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        ratio = median(ratios)
        limits.append({"ratio": ratio, "limit": limit, "kept": ratio >= limit})
        print(
            f"{name}: median {ratio:.2f}, of {min(ratios):.2f} to {max(ratios):.2f}, limit "
            f"{limit}: {'kept' if ratio >= limit else 'missed'}"
        )
    return limits


def count(folder: Path, cost_model: dict[str, Any]) -> None:
    """Count an epoch of four ranks that share the cores. Collective."""
    save_cost_model(folder, cost_model)
    model, counted = f"cost_model={folder / 'link.json'}", {}
    for name, options in {
        FIXED: CASES[FIXED],
        "sp_size=4, mixed": ["sp_size=4", "batch_order=mixed"],
        AUTO: CASES[AUTO],
    }.items():
        counted[name] = Run(folder, name, [*options, model]).epoch()
    say("\nan epoch on four ranks, counted:")
    report_counts(counted)
