"""Plans of many buckets: the public configs' are made in seconds, with progress on a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import open_sora_configs
import pytest

from opensora_sp.cli import main
from opensora_sp.config import load_train_config
from opensora_sp.planner import run_estimator
from opensora_sp.planner.run_plan import plan

pytestmark = pytest.mark.core
MANIFEST = "dataset.manifest=none.csv"

# As many as the public stages have in a resolution or two; the whole of stage 3 has 37.
BUCKETS = {
    "V1_1": {
        "144p": {1: (0.5, 48), 16: (1.0, 6), 32: (1.0, 3), 96: (1.0, 1)},
        "256": {1: (0.5, 24), 16: (0.5, 3), 48: (0.5, 1), 64: (0.0, None)},
    },
    "V1_2": {
        "144p": {1: (1.0, 475), 51: (1.0, 51), 102: (1.0, 27), 204: (1.0, 13), 408: (1.0, 6)},
        "720p": {1: (0.3, 36), 51: (0.2, 2), 102: (0.1, 1), 204: (0.0, None)},
    },
}
SECONDS_A_BUCKET = (
    2.0  # of CPU; 0.4 on a quiet core, 3 and more with a trace for each of two depths
)


@pytest.fixture(params=["V1_1", pytest.param("V1_2", marks=pytest.mark.slow)])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Arguments of `plan` for a stage of a public release."""
    config = tmp_path / "config.py"
    config.write_text(getattr(open_sora_configs, request.param))
    return [
        str(config),
        "--gpus",
        "8",
        "--cfg-options",
        MANIFEST,
        f"bucket_config={BUCKETS[request.param]}",
    ]


def test_each_bucket_is_traced_once_and_fast(
    stage: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_train_config(stage[0], stage[4:])
    trace, traced = run_estimator.trace_activations, []

    def counted(*args: object, **options: object) -> object:
        traced.append(args[2])
        return trace(*args, **options)

    monkeypatch.setattr(run_estimator, "trace_activations", counted)
    started = time.process_time()
    buckets = plan(cfg, 8).buckets
    seconds = time.process_time() - started

    assert len(buckets) == len(cfg.batches()) == len(traced) == len(set(traced))
    assert seconds < SECONDS_A_BUCKET * len(buckets), seconds


def test_each_bucket_is_printed_as_it_is_done(
    stage: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "bucket_config={'144p': {1: (1.0, 2), 16: (1.0, 1)}}"
    trace, printed = run_estimator.trace_activations, []

    def traced(*args: object, **options: object) -> object:
        printed.append(capsys.readouterr().out)
        return trace(*args, **options)

    monkeypatch.setattr(run_estimator, "trace_activations", traced)
    main(["plan", *stage[:-1], few])
    first, second = printed
    assert not first and "1 of 16 x 144x256" in second
    assert "2 of 1 x 144x256" in capsys.readouterr().out
