"""Time of a training step of two ranks on a slow link, where ``switch`` is half communication.

python -m benchmarks slow_link

The table takes about four minutes, two with --repeats 1. The script fails if a limit is missed.

Each rank runs in its own network namespace, and ``tc`` limits the bandwidth between them. At the
chosen rate a checkpointed step of plain ``switch`` takes twice as long as without a limit. All
cases run at this rate, in turn. A step is forward and backward on shards, without averaging
gradients, which costs the same in all cases.

gloo sends "ready to receive" after the data that is queued already. So one all_to_all mostly uses
one direction after the other, at half of the bandwidth. Several in-flight all-to-alls use both
directions, which is part of the gain of chunks here.

Needs root and iproute2 (``ip``, ``tc``); exits with 2 without them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import join_ranks
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.parallel import (
    CommLedger,
    SequenceMesh,
    parallelize,
    shutdown_process_group,
    unwrap,
)

RANKS, PATCHES, WIDTH, HEADS = 2, 256, 288, 4
DEVICE, ADDRESSES = "eth0", ("10.87.0.1", "10.87.0.2")  # seen inside the two namespaces only
STORE = f"tcp://{ADDRESSES[0]}:29500"
PROBE_BYTES = 4_000_000
EXCHANGES = ("switch", "heads")  # kinds of collectives that are all-to-alls here
SWITCH_TO_ULYSSES, OVERLAP_TO_SWITCH = 0.6, 0.9  # limits of the ratios, with checkpointing


@dataclass(frozen=True)
class Case:
    """What is timed: options of ``parallelize``, on the slowed link or on the free one."""

    name: str
    options: dict[str, object]
    slowed: bool = True


FREE, PLAIN = Case("switch, no limit", {}, slowed=False), Case("switch", {})
ULYSSES = Case("ulysses", dict(strategy="ulysses"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.rank is not None:
        return work(args)

    return on_slow_link("slow_link")


def on_slow_link(benchmark: str) -> dict[str, Any]:
    """Run this command on two ranks between which a link can be slowed down; what rank 0 returns.

    Exits with 2 where that is impossible.
    """
    lacking = [] if os.geteuid() == 0 else ["root"]
    lacking += [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if lacking:
        print(
            f"{benchmark} needs root and iproute2 to slow a link down; missing here: "
            f"{', '.join(lacking)}."
        )
        sys.exit(2)

    # The namespaces must be removed in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with namespaces() as names:
        return run_ranks(names)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[8, 4, 2], help="the limit is for the first"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds in which every case is timed once"
    )
    add_link_options(parser)


def add_link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-limits", action="store_true", help="only report; never fail")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a virtual cable between them."""
    names = [f"slow-link-{os.getpid()}-{rank}" for rank in range(RANKS)]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        cable = "ip link add {0} netns {1} type veth peer name {0} netns {2}"
        command(*cable.format(DEVICE, *names).split())
        for name, address in zip(names, ADDRESSES, strict=True):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                command("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:  # some may not have been made
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def run_ranks(names: list[str]) -> dict[str, Any]:
    """Run this command once in each namespace; returns what rank 0 does."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
        code = exit_code(start_ranks(names, files))
        if not files[0].exists():
            sys.exit(code or 1)
        return json.loads(files[0].read_text())


def start_ranks(names: list[str], files: list[Path]) -> list[subprocess.Popen]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    same = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    workers = []
    for rank, (name, file) in enumerate(zip(names, files, strict=True)):
        words = ["ip", "netns", "exec", name, *same, "--rank", str(rank), "--json", str(file)]
        workers.append(subprocess.Popen(words, env=environment))
    return workers


def exit_code(workers: list[subprocess.Popen]) -> int:
    """Wait for all; the first code that is not 0 ends the others."""
    try:
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [worker.poll() for worker in workers]
        return max(abs(worker.returncode or 0) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Run one rank; both know the times of the slower rank and so decide alike."""
    join_ranks(args.rank, RANKS, STORE)

    bench = Bench(args)
    bench.set_rate()
    overlaps = [
        Case(f"switch, {n} chunks, backward", dict(overlap_chunks=n, overlap_backward=True))
        for n in args.chunks
    ]
    bench.say(
        "| case | checkpointing | seconds | ratio to switch | MB sent per rank and step | "
        "all-to-alls |\n|---|---|---|---|---|---|"
    )

    seconds = bench.time_all([FREE, PLAIN, ULYSSES, *overlaps], checkpointing=True)
    bench.time_all([FREE, PLAIN, ULYSSES, *overlaps], checkpointing=False)
    part = f"{share(seconds[PLAIN.name], seconds[FREE.name]):.0%}"
    bench.say(f"communication in these rounds: {part} of a step of plain switch with checkpointing")

    limits = []
    for case, base, limit in (
        (PLAIN, ULYSSES, SWITCH_TO_ULYSSES),
        (overlaps[0], PLAIN, OVERLAP_TO_SWITCH),
    ):
        ratio = seconds[case.name] / seconds[base.name]
        limits.append({"ratio": ratio, "limit": limit, "kept": ratio <= limit})
        bench.say(
            f"{case.name} / {base.name}: {ratio:.2f}, limit {limit}: "
            f"{'missed' if ratio > limit else 'kept'}"
        )

    shutdown_process_group()

    # Rank 0 reports; the other rank just exits.
    kept = args.no_limits or args.rank != 0 or all(one["kept"] for one in limits)
    return {"seconds": seconds, "mbit_per_second": bench.rate / 1e6, "limits": limits, "kept": kept}


def share(slowed: float, free: float) -> float:
    """The part of a slowed step that is communication."""
    return 1 - free / slowed


class Bench:
    """One model on two ranks, and the link between them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.repeats, self.mesh = args.rank, args.repeats, SequenceMesh(RANKS)
        torch.manual_seed(0)
        self.model = build_model(
            "STDiT3",
            hidden_size=WIDTH,
            depth=args.pairs,
            num_heads=HEADS,
            mlp_ratio=4.0,
            caption_channels=8,
            model_max_length=4,
            patch_size=(1, 1, 1),
        )
        self.x = torch.randn(1, 4, args.frames, 1, PATCHES)
        self.inputs = self.x, torch.full((1,), 500.0), torch.randn(1, 1, 4, 8)
        self.rate = 0.0  # bit/s
        self.say(
            f"{RANKS} ranks, B=1 T={args.frames} S={PATCHES} C={WIDTH}, {args.pairs} pairs, fp32"
        )

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def set_rate(self) -> None:
        """Find and print the rate at which communication takes as long as everything else."""
        self.step(FREE)
        free, sent = self.several(FREE)
        self.rate = 8 * sent / free
        slowed, _ = self.several(PLAIN)
        if abs(share(slowed, free) - 0.5) > 0.03:
            self.say(
                f"at {self.rate / 1e6:.1f} Mbit/s communication is {share(slowed, free):.0%} of a "
                "step; adjusted"
            )
            # Bounded, since other processes may disturb the measurement.
            self.rate *= min(max((slowed - free) / free, 0.5), 3.0)
            slowed, _ = self.several(PLAIN)

        broadcast = self.carried(lambda received, _: dist.broadcast(received[0], 0))
        self.say(
            f"without a limit a step takes {free:.2f} s and each rank sends {sent / 1e6:.2f} MB; "
            f"at {self.rate / 1e6:.1f} Mbit/s it takes {slowed:.2f} s: communication is "
            f"{share(slowed, free):.0%}\na message travels at {broadcast:.1f} Mbit/s one way, in "
            f"an all_to_all at {self.carried(dist.all_to_all_single):.1f} each way\n"
        )

    def several(self, case: Case) -> tuple[float, int]:
        """Median seconds, and bytes sent, of a step with checkpointing."""
        seconds, sent, _ = zip(*(self.step(case) for _ in range(self.repeats)))
        return median(seconds), sent[0]

    def time_all(self, cases: list[Case], *, checkpointing: bool) -> dict[str, float]:
        """Median seconds of each case, printed as rows of the table.

        Cases take turns, so that other load on the machine affects all of them.
        """
        # Without checkpointing there is no limit to check.
        repeats = self.repeats if checkpointing else (self.repeats + 1) // 2
        rounds = []
        for _ in range(repeats):
            rounds.append([self.step(case, checkpointing=checkpointing) for case in cases])

        timed = {}
        for case, steps in zip(cases, zip(*rounds)):
            timed[case.name] = median(seconds for seconds, *_ in steps)

        for case, (_, sent, calls) in zip(cases, rounds[0], strict=True):
            self.say(
                f"| {case.name} | {'yes' if checkpointing else 'no'} | {timed[case.name]:.2f} | "
                f"{timed[case.name] / timed[PLAIN.name]:.2f} | {sent / 1e6:.2f} | {calls} |"
            )
        return timed

    def step(self, case: Case, *, checkpointing: bool = True) -> tuple[float, int, int]:
        """Seconds, bytes sent and all-to-alls of one forward and backward pass."""
        self.model.set_grad_checkpoint(checkpointing)
        self.model.zero_grad()
        parallelize(self.model, self.mesh, **case.options)
        limit_link(self.rate if case.slowed else None)
        with CommLedger() as counter, Clock() as clock:
            shard = self.model(*self.inputs, output="shards")
            rank_loss(velocity_loss(shard, self.x), global_samples=1, world_size=RANKS).backward()
        unwrap(self.model)
        calls = [n for (kind, _), n in counter.calls.items() if kind in EXCHANGES]
        return clock.seconds, sum(counter.bytes.values()), sum(calls)

    def carried(self, transfer: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        """Mbit/s of ``transfer(received, sent)`` to the other rank at the chosen rate."""
        received, sent = torch.zeros(2, RANKS, PROBE_BYTES // 4)
        limit_link(self.rate)
        with Clock() as clock:
            transfer(received, sent)
        return 8 * PROBE_BYTES / clock.seconds / 1e6


def limit_link(rate: float | None) -> None:
    """Limit the bandwidth of this rank's sends in bit/s; None is no limit."""
    discipline = ["pfifo"]
    if rate is not None:
        # The short burst does not make up for pauses.
        limits = f"rate {rate:.0f}bit burst 16kb latency 500ms"
        discipline = ["tbf", *limits.split()]
    command("tc", "qdisc", "replace", "dev", DEVICE, "root", *discipline)


class Clock:
    """Seconds from a barrier until the slower rank is done."""

    def __enter__(self) -> Clock:
        dist.barrier()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = torch.tensor(time.perf_counter() - self._start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.seconds = seconds.item()
