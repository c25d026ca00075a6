"""``grad_checkpoint="auto"``: buckets are planned when a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bucket_configs import FEW, write_bucket_config
from ranks import run_ranks

from opensora_sp.config import load_train_config
from opensora_sp.data.buckets import Buckets
from opensora_sp.data.resolutions import SIZES
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner import run_estimator
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.trace import Activations
from opensora_sp.training import memory_fit


@pytest.fixture
def config(tmp_path: Path) -> str:
    values = dict(cost_model="H100", sp_size="auto", grad_checkpoint="auto")
    return str(write_bucket_config(tmp_path, FEW, **values))


def levels_in_a_run(config: str, buckets: set[str] | None = None) -> tuple[int, int, list[str]]:
    """Shapes traced at the start and in the steps, and what blocks keep."""
    traced: list[tuple[int, ...]] = []

    def trace(name: str, config: Any, latents: tuple[int, ...], **others: Any) -> Activations:
        traced.append(latents)
        # 144p x 1 fits any GPU; of 8 frames, the inputs of blocks fit none.
        per_pair = 1e5 if latents[2] == 1 else 1e11 * (1 + others["level"])
        return Activations(first=0.0, pair=per_pair, inputs=0)

    run_estimator.trace_activations = trace
    memory_fit.available_memory = lambda *_: 80e9
    kept: list[str] = []
    module: Any = SimpleNamespace(
        compile_backend=None, set_grad_checkpoint=lambda levels: kept.append(str(levels))
    )
    cfg = load_train_config(config)
    mesh = SequenceMesh("auto")
    budget = memory_fit.ActivationBudget(cfg, module, mesh, torch.device("cuda"), 0, buckets)
    at_start = len(traced)
    run = RunEstimator(cfg, mesh.world_size)
    for entry in Buckets.of(cfg.bucket_config or {}).kept:
        if buckets is not None and entry.name not in buckets:
            continue
        for height, width in SIZES[entry.resolution].values():
            size = run.latents(
                SimpleNamespace(  # type: ignore[arg-type]
                    batch_size=entry.batch_size,
                    num_frames=entry.num_frames,
                    image_size=(height, width),
                )
            )
            # A whole batch, and the last of an epoch.
            for num_clips in (size[0], 1):
                budget.set_levels_for(torch.Size((num_clips, *size[1:])))
    return at_start, len(traced) - at_start, kept


def test_a_run_s_steps_trace_nothing(config: str) -> None:
    found = run_ranks(2, levels_in_a_run, config)
    # Three buckets: each is traced by one rank.
    assert all(at_start > 0 and in_steps == 0 for at_start, in_steps, _ in found)
    (_, _, kept), (_, _, others) = found
    assert kept == others and len(set(kept)) == 2


def test_a_bucket_without_clips_decides_nothing(config: str) -> None:
    found = run_ranks(2, levels_in_a_run, config, {"144p x 1"})
    for _, in_steps, kept in found:
        assert in_steps == 0 and len(set(kept)) == 1
    # One bucket is traced, by one rank.
    assert min(at_start for at_start, *_ in found) == 0
