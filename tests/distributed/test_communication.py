"""What a training step sends, to the element, against ``benchmarks/communication.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import run_ranks

from benchmarks.communication import (
    DEPTH,
    HEADS,
    Case,
    count,
    moved_tokens,
    predicted_bytes,
)

pytestmark = pytest.mark.core
# Elements are proportional to the width, so a narrow model shows those of a wide one.
ONE = Case(1, 16, 256, width=8)
WIDE = 288 // ONE.width
# MB: ours at most; v1.2, VideoSys.
PEERS = {
    2: (17, 61.6, 89.9, 23.6, 33.0),
    4: (13, 50.0, 71.2, 21.2, 28.3),
}
ULYSSES, GATHER = dict(strategy="ulysses"), dict(strategy="split_gather")


def unit(case: Case, ranks: int) -> float:
    """Bytes of ``u = (P-1)/P * B*T*S*C/P`` elements."""
    return (ranks - 1) / ranks * case.batch * case.frames * case.patches * case.width / ranks * 4


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_step_sends_what_is_predicted(ranks: int) -> None:
    small = Case(1, 8, 16, width=8)
    both = [small, replace(small, checkpointing=True)]
    plain = [ONE, replace(ONE, checkpointing=True)]
    batches = [replace(small, batch=batch) for batch in (2, 3, 4, 8)]
    odd = [Case(3, 5, 63, width=8), Case(5, 7, 33, width=8)]
    gather = [replace(case, options=GATHER) for case in both]
    ulysses = [replace(case, options=ULYSSES) for case in both]
    cases = [*plain, *batches, *odd, *gather, *ulysses]
    counted, *_ = run_ranks(ranks, count, cases)
    sent = dict(zip(map(repr, cases), counted, strict=True))
    for case in (*plain, *batches, *odd, *gather):
        mean, busiest, again = sent[repr(case)]
        assert mean == pytest.approx(predicted_bytes(case, ranks), rel=1e-12), case
        assert busiest >= mean and (again == 0 or case.options == GATHER)

    pairs = 4 * (2 * DEPTH - 1) / (2 * DEPTH) * DEPTH  # u a step, for all pairs
    for case in plain:
        assert sent[repr(case)][0] == pytest.approx(pairs * unit(case, ranks), rel=1e-12)
        if ranks in PEERS:
            ours, *theirs = PEERS[ranks]
            assert sent[repr(case)][0] * WIDE / 1e6 <= ours < min(theirs)

    for case in batches:
        if ranks % case.batch == 0:
            share = (1 - case.batch / ranks) / (1 - 1 / ranks)
            assert sent[repr(case)][0] == pytest.approx(
                share * pairs * unit(case, ranks), rel=1e-12, abs=0
            )
        if case.batch % ranks == 0:
            assert sent[repr(case)][1] == 0 and moved_tokens(case, ranks) == 0

    for case in ulysses:  # 8 u a pair forward, as much backward, and forward once more in recompute
        u = unit(case, ranks)
        if HEADS % ranks == 0:
            passes = 3 if case.checkpointing else 2
            assert sent[repr(case)][0] == pytest.approx(8 * passes * DEPTH * u, rel=1e-12)
        assert (sent[repr(case)][2] > 0) == case.checkpointing
