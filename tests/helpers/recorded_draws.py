"""Records what training draws at random."""

from __future__ import annotations

import hashlib


def record_draws(into: dict[int, tuple]) -> None:
    """Note what is drawn for each micro-batch of this rank."""
    from opensora_sp.features import batch as module

    BatchMaker, noise = module.BatchMaker, []
    make = getattr(BatchMaker.make, "original", BatchMaker.make)
    normal = getattr(module.normal, "original", module.normal)

    def recorded_normal(*args):
        noise.append(normal(*args))
        return noise[-1]

    def recorded(self, micro_batch, ids, *args):
        noise.clear()
        batch = make(self, micro_batch, ids, *args)
        assert len(noise) == len(ids)
        drawn = [*noise, batch.noised.t, batch.inputs["drop_caption"], batch.inputs["drop_path"]]
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in drawn)).hexdigest()
        into[micro_batch] = (tuple(ids), tuple(batch.noised.t.tolist()), digest)
        return batch

    recorded.original, recorded_normal.original = make, normal
    BatchMaker.make, module.normal = recorded, recorded_normal
