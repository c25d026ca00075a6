"""Results of optimizer steps are read one step late, in their order, and each once."""

from __future__ import annotations

import torch

from opensora_sp.training.step import DelayedResults, PendingResult, StepResult


def pending(step: int, loss: float, *, taken: bool = True, stop: float = 0.0) -> PendingResult:
    return PendingResult(
        step, loss=torch.tensor(loss), taken=torch.tensor(taken), stop=torch.tensor(stop)
    )


def test_a_result_is_read_when_the_next_step_is_queued_or_settled() -> None:
    seen: list[StepResult] = []
    results = DelayedResults(seen.append)
    results.add(pending(1, 0.5))
    assert not seen

    results.add(pending(2, float("nan"), taken=False, stop=2.0))
    assert seen == [StepResult(1, 0.5, taken=True, stop=False)] and not results.asked_to_stop

    results.settle()
    results.settle()
    assert [result.step for result in seen] == [1, 2] and results.asked_to_stop
    assert not seen[1].taken and seen[1].stop

    # A request stays, whatever later steps report.
    results.add(pending(3, 0.25))
    results.settle()
    assert seen[2].loss == 0.25 and results.asked_to_stop
