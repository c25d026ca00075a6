"""What a data set of the user's draws under ``prepare_dataloader``.

campaigns/test_reshard.py has the draws of our own training, the same for every (dp, sp).
"""

from __future__ import annotations

import multiprocessing
import random

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.data import Dataset


class Drawing(Dataset):
    """Each sample is drawn, by three generators, in whichever process reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.random()), random.random()


def drawn(num_workers: int, seed: int) -> list[list[float]]:
    from opensora_sp.plugin import SequenceParallelPlugin

    multiprocessing.current_process()._config["daemon"] = False  # so that loaders may have workers
    plugin = SequenceParallelPlugin(sp_size=2, precision="fp32")
    torch.manual_seed(100 + torch.distributed.get_rank())  # which must not matter
    loader = plugin.prepare_dataloader(
        Drawing(), batch_size=1, shuffle=True, seed=seed, num_workers=num_workers
    )
    return [torch.cat([column.double() for column in batch]).tolist() for batch in loader]


def all_drawn() -> dict[str, list[list[float]]]:
    return {
        "workers": drawn(2, 7),
        "again": drawn(2, 7),
        "another seed": drawn(2, 8),
        "no workers": drawn(0, 7),
    }


@pytest.mark.slow
def test_ranks_of_a_group_draw_alike_replicas_and_workers_do_not() -> None:
    ranks = run_ranks(4, all_drawn)
    for name in ("workers", "another seed"):
        assert ranks[0][name] == ranks[1][name] and ranks[2][name] == ranks[3][name]
    assert all(rank["workers"] == rank["again"] for rank in ranks)
    for generator in (1, 2, 3):
        # Two replicas of two workers, four batches each.
        batches = ranks[0]["workers"] + ranks[2]["workers"]
        numbers = [batch[generator] for batch in batches]
        assert len(set(numbers)) == len(numbers) == 8
        assert not set(numbers) & {batch[generator] for batch in ranks[0]["another seed"]}

    for rank in ranks:  # the order does not depend on workers
        assert [batch[0] for batch in rank["no workers"]] == [batch[0] for batch in rank["workers"]]
    batches = ranks[0]["no workers"] + ranks[2]["no workers"]
    assert {batch[0] for batch in batches} == set(range(8))
