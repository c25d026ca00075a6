"""Many short-lived gloo groups, with asynchronous collectives of tensors that Python made.

``python short_groups.py torch|ours NUMBER SECONDS`` ends each of them with torch's function or with
ours, in one process. It exits with status 1 and all stacks where one group takes so many seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from opensora_sp.parallel import shutdown_process_group


def use_and_end(
    store: dist.Store, rank: int, ranks: int, number: int, end: Callable[[], None]
) -> None:
    """One process group with a group made from it, and works of every kind a run leaves behind."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    part = dist.new_group(list(range(ranks)))

    for group in (None, part):
        works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(4)]
        if number % 2:
            for work in works:
                work.wait()
        del works

    # Some object keeps a group beyond the end of its world in every third case.
    if number % 3:
        del group, part
    end()


def in_worlds_of(
    rank: int, ranks: int, count: int, seconds: float, end: Callable[[], None], store: dist.Store
) -> None:
    # Passed over by the collections of garbage at the end of each group, which take far longer.
    gc.collect()
    gc.freeze()

    for number in range(count):
        faulthandler.dump_traceback_later(seconds, exit=True)
        use_and_end(dist.PrefixStore(f"{number}", store), rank, ranks, number, end)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    whose, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    end = {"torch": dist.destroy_process_group, "ours": shutdown_process_group}[whose]
    in_worlds_of(0, 1, count, seconds, end, dist.HashStore())
    print(f"{count} groups ended")


if __name__ == "__main__":
    main()
