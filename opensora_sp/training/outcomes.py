"""Outcomes of optimizer steps, which the host reads one step late.

A step's loss, and whether its update was taken, are numbers on the device. A host that waited for
them could not queue the next step meanwhile, and the device would idle. So the outcome of a step is
copied asynchronously, and read when the next step is queued. What has to be exact, a checkpoint or
a line of the log, settles the last step first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_sp.common.tensors import ToHost


@dataclass(frozen=True)
class Outcome:
    """The result of one optimizer step, equal on all ranks."""

    step: int  # counted from 1
    loss: float  # mean over the step's samples
    taken: bool  # False: loss or gradient were not finite, and no weight has changed
    stop: bool  # some rank was asked to stop


class PendingOutcome:
    """The outcome of a step that may still be computed.

    Args:
        step: counted from 1.
        loss: mean over the step's samples, a scalar.
        taken: whether the weights were updated, a bool scalar.
        stop: a scalar, above 0 where some rank was asked to stop.
    """

    def __init__(self, step: int, *, loss: Tensor, taken: Tensor, stop: Tensor) -> None:
        self.step = step
        self._numbers = ToHost(torch.stack([loss, taken.to(loss), stop]))

    def read(self) -> Outcome:
        """Wait until the step is computed."""
        loss, taken, stop = self._numbers.tolist()
        return Outcome(self.step, loss, taken=taken > 0, stop=stop > 0)
