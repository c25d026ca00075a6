"""Who holds which rows, and what each rank sends to each other: integer arithmetic, no processes.

A batch of tokens ``(b, t, s)`` is kept either as ``B * T`` spatial rows ``(b, t)`` or as ``B * S`` temporal rows
``(b, s)``. Rows are counted batch-major and every rank holds a contiguous run of them; runs differ by at most one row.

Turning one layout into the other is then a fixed exchange: every rank can compute, from the sizes alone, which tokens
it sends to whom (``send_splits``, in the order ``pack``) and where the tokens it receives belong (``unpack``).

Legend: B samples, P ranks, A rows per sample and L tokens per row in the layout left; the other way round in the
layout entered, where a token (b, a, l) lies in row (b, l) at place a.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def balanced_run(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The rows ``[start, stop)`` of one rank: contiguous, and as many as any other rank's, give or take one."""
    return num_rows * rank // num_ranks, num_rows * (rank + 1) // num_ranks


def run_sizes(num_rows: int, num_ranks: int) -> list[int]:
    """Rows held by each rank."""
    return [stop - start for start, stop in (balanced_run(num_rows, num_ranks, r) for r in range(num_ranks))]


def owners(rows: Tensor, num_rows: int, num_ranks: int) -> Tensor:
    """The rank that holds each of ``rows``."""
    stops = torch.tensor([balanced_run(num_rows, num_ranks, rank)[1] for rank in range(num_ranks)])
    return torch.bucketize(rows, stops, right=True)


@dataclass(frozen=True)
class SwitchPlan:
    """One rank's part in turning the rows of a batch into the rows of the other layout.

    ``pack`` orders the tokens held by receiver: ``sent = tokens[pack]``, cut by ``send_splits``. ``unpack`` puts what
    arrives, sender by sender as ``recv_splits`` says, in place: ``tokens = received[unpack]``.
    """

    pack: Tensor
    unpack: Tensor
    send_splits: list[int]
    recv_splits: list[int]

    def sent_elsewhere(self, rank: int) -> int:
        """Tokens that leave this rank."""
        return sum(self.send_splits) - self.send_splits[rank]


@lru_cache(maxsize=256)
def plan_switch(
    num_samples: int, rows_per_sample: int, row_length: int, num_ranks: int, rank: int, device: torch.device | str
) -> SwitchPlan:
    """Plan the switch away from the layout of ``rows_per_sample`` rows of ``row_length`` tokens."""
    with torch.inference_mode(False):  # a plan made while sampling serves training as well
        return _plan_switch(num_samples, rows_per_sample, row_length, num_ranks, rank, device)


def _plan_switch(B: int, A: int, L: int, num_ranks: int, rank: int, device: torch.device | str) -> SwitchPlan:
    def held(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens this rank holds, in order: sample, row in the sample, place in the row."""
        tokens = torch.arange(*(edge * length for edge in balanced_run(B * rows, num_ranks, rank)))
        return tokens // (rows * length), tokens // length % rows, tokens % length

    b, _, l = held(A, L)
    receiver = owners(b * L + l, B * L, num_ranks)
    b, l, a = held(L, A)
    sender = owners(b * A + a, B * A, num_ranks)
    arrival = torch.argsort((b * A + a) * L + l)  # senders pack in the order of the layout left
    return SwitchPlan(
        pack=torch.argsort(receiver, stable=True).to(device),
        unpack=torch.argsort(arrival).to(device),
        send_splits=torch.bincount(receiver, minlength=num_ranks).tolist(),
        recv_splits=torch.bincount(sender, minlength=num_ranks).tolist(),
    )
