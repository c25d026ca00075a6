"""Bytes that one training step sends per rank, counted on CPU, against the prediction.

python -m benchmarks communication        # the tables of docs/communication.md
python -m benchmarks communication --batch 3 --frames 5 --ranks 8
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import on_ranks
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize

DEPTH, HEADS = 4, 4


@dataclass(frozen=True)
class Case:
    """One training step: clips of ``frames`` x ``patches`` tokens, and the options of SP."""

    batch: int
    frames: int
    patches: int
    width: int = 288
    checkpointing: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ", ".join(str(value) for value in self.options.values()) or "switch"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--patches", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])


def run(args: argparse.Namespace) -> dict[str, Any]:

    print(
        f"T={args.frames} S={args.patches} C=288, {DEPTH} pairs, fp32; MB = 1e6 bytes sent per "
        "rank and step\n"
    )
    print(
        "| ranks | B | how | checkpointing | mean MB | busiest MB | of it recompute | predicted "
        "mean MB |"
    )
    print("|---|---|---|---|---|---|---|---|")

    rows = []
    for ranks in args.ranks:
        cases = []
        for options in STRATEGIES:
            plain = Case(args.batch or 1, args.frames, args.patches, options=options)
            cases += [plain, replace(plain, checkpointing=True)]
        if not args.batch:
            cases += [Case(batch, args.frames, args.patches) for batch in (2, 3, 4, 8)]

        for case, sent in zip(cases, on_ranks(ranks, count, cases), strict=True):
            row = row_of(case, ranks, sent)
            rows.append(row)
            print(markdown(row))
    return {"rows": rows}


def row_of(case: Case, ranks: int, sent: tuple[float, float, float]) -> dict[str, Any]:
    """Bytes that were counted and predicted for a case."""
    mean, busiest, again = sent
    return {
        "ranks": ranks,
        "batch": case.batch,
        "how": case.name,
        "checkpointing": case.checkpointing,
        "mean": mean,
        "busiest": busiest,
        "recompute": again,
        "predicted": predicted_bytes(case, ranks),
    }


def markdown(row: dict[str, Any]) -> str:
    sizes = [row[key] for key in ("mean", "busiest", "recompute", "predicted")]
    in_mb = ["" if size is None else f"{size / 1e6:.2f}" for size in sizes]
    checkpointing = "yes" if row["checkpointing"] else "no"
    cells = [str(row["ranks"]), str(row["batch"]), row["how"], checkpointing, *in_mb]
    return f"| {' | '.join(cells)} |"


STRATEGIES: list[dict[str, Any]] = [
    {},
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]


def count(cases: list[Case]) -> list[tuple[float, float, float]]:
    """For each case the bytes of the mean rank, of the busiest, and of the mean in recompute.

    Collective.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, found = SequenceMesh(ranks), []
    for case in cases:
        counter = step(case, mesh)
        sent = torch.zeros(2, ranks, dtype=torch.float64)
        sizes = bytes_of(counter)
        sent[0, rank] = sum(sizes.values())
        sent[1, rank] = sum(size for (_, phase), size in sizes.items() if phase == "recompute")
        dist.all_reduce(sent)
        found.append((sent[0].mean().item(), sent[0].max().item(), sent[1].mean().item()))
    return found


def bytes_of(counter: CommLedger) -> dict[tuple[str, str], int]:
    """Without the comparison of shapes, 16 bytes a step."""
    return {key: n for key, n in counter.bytes.items() if key[0] != "check"}


def step(case: Case, mesh: SequenceMesh) -> CommLedger:
    """What this rank sends in one forward and backward pass on shards."""
    torch.manual_seed(0)
    model = build_model(
        "STDiT3",
        hidden_size=case.width,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=1.0,
        caption_channels=8,
        model_max_length=4,
        patch_size=(1, 1, 1),
    )
    model.set_grad_checkpoint(case.checkpointing)
    parallelize(model, mesh, **case.options)
    x = torch.randn(case.batch, 4, case.frames, 1, case.patches)
    t, y = torch.full((case.batch,), 500.0), torch.randn(case.batch, 1, 4, 8)

    with CommLedger() as counter:
        losses = velocity_loss(model(x, t, y, output="shards"), x)
        rank_loss(losses, global_samples=case.batch, world_size=mesh.sp_size).backward()
    return counter


def predicted_bytes(case: Case, ranks: int) -> float | None:
    """Bytes of the mean rank, by brute force over all tokens; None for ulysses."""
    strategy, token_bytes = case.options.get("strategy"), 4 * case.width
    if strategy == "ulysses":
        return None

    # Before each attention, all tokens are sent to all other ranks.
    if strategy == "split_gather":
        passes = 3 if case.checkpointing else 2
        tokens = case.batch * case.frames * case.patches
        return 2 * DEPTH * passes * (ranks - 1) * tokens * token_bytes / ranks

    switches = 2 * DEPTH - 1
    return 2 * switches * moved_tokens(case, ranks) * token_bytes / ranks


def moved_tokens(case: Case, ranks: int) -> int:
    """Tokens whose holder differs between the layouts, counted one by one."""
    return sum(
        holder(spatial, case.batch * case.frames, ranks)
        != holder(temporal, case.batch * case.patches, ranks)
        for spatial, temporal in rows_of_all_tokens(case)
    )


def rows_of_all_tokens(case: Case) -> Iterator[tuple[int, int]]:
    for b in range(case.batch):
        for t in range(case.frames):
            for s in range(case.patches):
                yield b * case.frames + t, b * case.patches + s


def holder(row: int, rows: int, ranks: int) -> int:
    """The rank r with ``rows * r // ranks <= row < rows * (r + 1) // ranks``."""
    return ((row + 1) * ranks - 1) // rows
