"""Count what one training step sends, per rank, against the prediction. Counted, not timed; runs on CPU.

python benchmarks/communication.py                  # the table of docs/communication.md
python benchmarks/communication.py --batch 3 --frames 5 --ranks 8
"""

import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize

WIDTH, DEPTH = 288, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--patches", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    print(
        f"B={args.batch} T={args.frames} S={args.patches} C={WIDTH}, {DEPTH} pairs, fp32; MB = 1e6 bytes sent per rank"
    )
    print("| ranks | checkpointing | mean MB | busiest rank MB | recompute MB | predicted mean MB |")
    print("|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for checkpointing in (False, True):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(step, (ranks, port, args, checkpointing), nprocs=ranks)


def step(rank: int, ranks: int, port: int, args: argparse.Namespace, checkpointing: bool) -> None:
    """One forward and backward pass on shards; rank 0 prints what all ranks sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = build_model(
        "STDiT3", hidden_size=WIDTH, depth=DEPTH, num_heads=4, mlp_ratio=1.0, caption_channels=8, model_max_length=4,
        patch_size=(1, 1, 1),
    )  # fmt: skip
    model.set_grad_checkpoint(checkpointing)
    parallelize(model, SequenceMesh(ranks))
    x = torch.randn(args.batch, 4, args.frames, 1, args.patches)
    with CommLedger() as ledger:
        shard = model(x, torch.full((args.batch,), 500.0), torch.randn(args.batch, 1, 4, 8), output="shards")
        rank_loss(velocity_loss(shard, x), global_samples=args.batch, world_size=ranks).backward()
    sent = torch.zeros(2, ranks)
    sent[0, rank] = sum(ledger.elements.values()) * 4 / 1e6
    sent[1, rank] = sum(n for (_, phase), n in ledger.elements.items() if phase == "recompute") * 4 / 1e6
    dist.all_reduce(sent)
    if rank == 0:
        switches = 2 * DEPTH - 1
        tokens = args.batch * args.frames * args.patches
        # of a token's C numbers each switch moves the share that does not already lie on the right rank
        share = moved_share(args.batch, args.frames, args.patches, ranks)
        predicted = 2 * switches * share * tokens * WIDTH / ranks * 4 / 1e6
        total, again = sent
        print(
            f"| {ranks} | {'yes' if checkpointing else 'no'} | {total.mean():.2f} | {total.max():.2f} | "
            f"{again.sum():.2f} | {predicted:.2f} |"
        )
    dist.destroy_process_group()


def moved_share(batch: int, frames: int, patches: int, ranks: int) -> float:
    """Share of all tokens whose holder differs between the layouts, by brute force over every token."""
    moved = 0
    for b in range(batch):
        for t in range(frames):
            for s in range(patches):
                spatial, temporal = b * frames + t, b * patches + s
                moved += holder(spatial, batch * frames, ranks) != holder(temporal, batch * patches, ranks)
    return moved / (batch * frames * patches)


def holder(row: int, rows: int, ranks: int) -> int:
    """The rank r with ``rows * r // ranks <= row < rows * (r + 1) // ranks``."""
    return ((row + 1) * ranks - 1) // rows


if __name__ == "__main__":
    main()
