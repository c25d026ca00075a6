"""The planner's last resort: inputs of as few blocks as needed on the host, and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensora_sp.cli import main
from opensora_sp.config import load_train_config
from opensora_sp.models.recompute import OFFLOADED
from opensora_sp.planner.memory import budget_of
from opensora_sp.planner.run_estimator import Memory, RunEstimator

pytestmark = pytest.mark.slow

CONFIG = str(Path(__file__).parents[2] / "configs/stdit3/train/64x512x512_sp8.py")
LATENTS = (1, 4, 360, 64, 64)
INPUT = 360 * 32 * 32 * 1152 * 2  # bytes
SETTINGS = ["sp_size=1", "model.depth=6", "num_frames=360"]


def memory_of(memory_gb: float, *, device: str = "cuda", setting: str = "auto") -> Memory:
    cfg = load_train_config(CONFIG, [*SETTINGS, f"grad_checkpoint={setting}"])
    return RunEstimator(cfg, 1, 1e9 * memory_gb, device=device).memory_of(LATENTS, 1)


def test_inputs_leave_the_device_only_where_recomputation_does_not_suffice():
    recomputed = memory_of(80, setting="True").peak
    offloaded = memory_of(80, setting="offload").peak
    # Of twelve inputs two stay.
    assert recomputed.activations - offloaded.activations == pytest.approx(10 * INPUT, rel=0.01)

    enough = (recomputed.needed + 3e9) / 0.95e9 + 0.01
    assert OFFLOADED not in memory_of(enough).levels
    assert OFFLOADED not in memory_of(1, device="cpu").levels

    too_little = enough - 0.5
    memory = memory_of(too_little)
    number = memory.levels.count(OFFLOADED)
    assert 0 < number < 12 and memory.levels == sorted(memory.levels, reverse=True)
    assert memory.pinned == number * 2**30  # a power of two holds an input of 849 MB
    assert memory.peak.needed <= budget_of(too_little * 1e9)
    assert memory_of(1).levels == [OFFLOADED] * 12


def test_bytes_on_the_host_are_those_of_buffers():
    """An input of 18 MiB takes one of 32."""
    cfg = load_train_config(CONFIG, ["grad_checkpoint=offload"])
    memory = RunEstimator(cfg, 8).memory_of((1, 4, 64, 64, 64), 8)
    assert memory.pinned == 56 * 32 * 1024**2
    assert memory.describe().endswith("pinned host memory: 1.879 GB of a rank")


def test_plan_states_bytes(capsys: pytest.CaptureFixture[str]):
    settings = [*SETTINGS, "grad_checkpoint=offload"]
    main(["plan", CONFIG, "--gpus", "1", "--gpu", "H200", "--cfg-options", *settings])
    text = " ".join(capsys.readouterr().out.split())
    assert "inputs of 12 of 12 blocks are kept in pinned host memory: 12.885 GB of a rank" in text
