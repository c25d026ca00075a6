"""Outcomes of optimizer steps, counted, and their numbers, logged for each interval of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opensora_sp.data import MicroBatch

from .bucket_shares import BucketShares
from .ending import advice_for_long_steps
from .metrics import Reporter
from .optimizer import learning_rate
from .outcomes import Outcome

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """Totals since the last line of the log."""

    start: float
    tokens: int = 0  # of all replicas
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # of the steps that were taken


class StepLog:
    """Counts the steps of a run, and logs the numbers of each interval.

    Attributes:
        interval: since the last line of the log.
        skipped: steps of the run whose loss or gradient was not finite.
        skipped_in_a_row: those since the last step that was taken.
    """

    def __init__(self, trainer: Trainer, skipped: int) -> None:
        self.trainer, self.skipped, self.skipped_in_a_row = trainer, skipped, 0
        self.bucket_shares = BucketShares(trainer.mesh, trainer.rank_batches)
        self._warned_of_grace_time = False
        self.begin_interval(time.perf_counter())

    def begin_interval(self, now: float) -> None:
        """Begin with no steps at ``now``, in seconds of ``time.perf_counter``."""
        self.interval = Interval(now)

    def see(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step, of all replicas."""
        for one in micro_batches:
            self.interval.tokens += len(one.ids) * self.trainer.work.tokens(one.shape)
        self.bucket_shares.see(step, micro_batches)

    def count(self, outcome: Outcome) -> None:
        """Count an outcome; raises ValueError after ``max_bad_steps`` skipped steps in a row."""
        self.interval.steps += 1
        if outcome.taken:
            self.interval.losses.append(outcome.loss)
            self.skipped_in_a_row = 0
            return

        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.trainer.mesh.rank == 0:
            message = "step %d skipped: the loss (%g) or a gradient is not finite"
            logger.warning(message, outcome.step, outcome.loss)
        if self.skipped_in_a_row < self.trainer.cfg.max_bad_steps:
            return

        raise ValueError(
            f"got no finite loss and gradient in {self.skipped_in_a_row} steps in a row, up to "
            f"step {outcome.step} (max_bad_steps); expected numbers; lower optimizer.lr or set "
            f"grad_clip, and {self.trainer.checkpoints.advice()}"
        )

    def write(self, reporter: Reporter, done: int) -> None:
        """Log the numbers of the interval that ends here, and begin the next one. Collective."""
        values = self._measure(done)
        reporter.log(done, values, self.trainer.meter.peak.tflops, self.trainer.meter.by_rank)
        advice = advice_for_long_steps(values["step_time"] or 0.0, self.trainer.cfg.grace_time)
        if advice is not None and not self._warned_of_grace_time:
            logger.warning("%s", advice)
            self._warned_of_grace_time = True
        self.begin_interval(time.perf_counter())

    def _measure(self, done: int) -> dict[str, float | None]:
        """The numbers of the interval, by their names in ``metrics.jsonl``. Collective."""
        trainer, losses = self.trainer, self.interval.losses
        substituted = trainer.corrupt.report(trainer.device)
        grad_norm = trainer.optimizer.get_grad_norm()
        seconds = time.perf_counter() - self.interval.start
        measured = trainer.meter.measure(
            trainer.loader.take_waited(),
            steps=self.interval.steps,
            seconds=seconds,
            left=trainer.cfg.max_steps - done,
        )
        return {
            "loss": sum(losses) / len(losses) if losses else None,
            "grad_norm": 0.0 if grad_norm is None else float(grad_norm),
            "lr": learning_rate(trainer.cfg, done - 1),
            "tokens_per_s": self.interval.tokens / seconds,
            "replaced_clips": substituted,
            "skipped_steps": self.skipped,
            **measured,
            **self.bucket_shares.take(),
        }
