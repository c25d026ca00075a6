"""Records what training draws at random."""

from __future__ import annotations

import hashlib


def record_draws(into: dict[int, tuple]) -> None:
    """Note what is drawn for each micro-batch of this rank."""
    from opensora_sp.features.batch import BatchMaker
    from opensora_sp.training.step import TrainingStep

    make = getattr(BatchMaker.make, "original", BatchMaker.make)
    batch_of = getattr(TrainingStep._batch, "original", TrainingStep._batch)
    made = []

    def recorded_make(self, features, draws, **options):
        batch = make(self, features, draws, **options)
        made[:] = [(draws, batch)]
        return batch

    def recorded(self, loaded):
        batch_of(self, loaded)
        ((draws, batch),) = made
        if not loaded.micro_batch.ids:
            return batch
        drawn = [*draws.noise, batch.noised.t, batch.inputs["drop_caption"], draws.drop_path]
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in drawn)).hexdigest()
        ids, times = tuple(batch.ids.tolist()), tuple(batch.noised.t.tolist())
        into[loaded.micro_batch.number] = (ids, times, digest, draws.frame_mask)
        return batch

    recorded.original, recorded_make.original = batch_of, make
    TrainingStep._batch, BatchMaker.make = recorded, recorded_make
