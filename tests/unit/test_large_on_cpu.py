"""The warning where a large model is about to run on CPUs, and that nothing is loaded before it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensora_sp import plugin
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.parallel.cost_model import CPU
from opensora_sp.planner.flops import ModelFlops
from opensora_sp.planner.large_on_cpu import warn_if_large_on_cpu
from opensora_sp.planner.trace import meta_model
from opensora_sp.plugin import _colossalai
from opensora_sp.sampling import run
from opensora_sp.training import trainer

TRAIN, SAMPLE = "configs/stdit3/train/16x256x256_sp2.py", "configs/stdit3/inference/16x256x256.py"
CPU_DEVICE = torch.device("cpu")
SECONDS = {"minutes": 60, "hours": 3600}


class LoadedError(Exception):
    """Weights would be loaded here."""


def refuse(*_: Any, **__: Any) -> None:
    raise LoadedError


def logged(caplog: pytest.LogCaptureFixture) -> tuple[float, float]:
    """Seconds and GB that the only message of the log states."""
    (message,) = caplog.messages
    assert message.startswith("STDiT3-XL/2 has 1209 M parameters, and torch sees no GPU: expect")
    assert "opensora-sp doctor" in message and "opensora-sp init" in message
    found = re.search(r"at least ([\d.]+) (\w+) .* ([\d.]+) GB of memory", message)
    assert found, message
    return float(found[1]) * SECONDS[found[2]], float(found[3])


def forward_flops(spec: Any, num_samples: int) -> float:
    """Of clips of 16 frames of 256x256 pixels, at an eighth of the size, with 300 text tokens."""
    model = meta_model(spec.name, spec.config, torch.bfloat16)
    return ModelFlops.of(model).forward((num_samples, 4, 16, 32, 32), 300.0 * num_samples)


def test_sampling_warns_before_encoders_and_model_are_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_inference_config(SAMPLE)
    monkeypatch.setattr(run, "build_component", refuse)
    with pytest.raises(LoadedError):
        run.build_pipeline(cfg, Path("weights"), SequenceMesh(1), CPU_DEVICE)

    seconds, gigabytes = logged(caplog)
    assert gigabytes == pytest.approx(1.209 * 2, rel=0.05)  # bf16
    # With and without caption, at each step.
    flops = forward_flops(cfg.model_spec, 2 * cfg.batch_size) * cfg.scheduler["num_sampling_steps"]
    assert 1 < seconds * torch.get_num_threads() * CPU.flops / flops < 2


def test_training_warns_before_encoders_and_model_are_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_train_config(TRAIN)
    made = SimpleNamespace(mesh=SequenceMesh.imagined(2, 0), sequence_parallel=Options())
    monkeypatch.setattr(plugin.SequenceParallelPlugin, "from_config", lambda _: made)
    monkeypatch.setattr(_colossalai, "Booster", lambda plugin: plugin)
    monkeypatch.setattr(trainer, "make_source", refuse)
    dataset: Any = None
    with pytest.raises(LoadedError):
        trainer.Trainer(cfg, dataset, None, CPU_DEVICE)

    seconds, gigabytes = logged(caplog)
    # Weights in bf16; of half of them, the part of a rank, master weights, moments and EMA.
    assert gigabytes == pytest.approx(1.209 * (2 + 16 / 2), rel=0.05)
    # Forward, backward and recomputation, shared by two ranks.
    flops = 4 * forward_flops(cfg.model_spec, cfg.batch_size) / 2
    assert 1 < seconds * torch.get_num_threads() * CPU.flops / flops < 2


def test_small_models_and_gpus_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mesh = SequenceMesh.imagined(2, 0)
    warn_if_large_on_cpu(load_train_config("configs/demo/first.py"), CPU_DEVICE, mesh)
    warn_if_large_on_cpu(load_inference_config("configs/demo/sample.py"), CPU_DEVICE, mesh)
    warn_if_large_on_cpu(load_train_config(TRAIN), torch.device("cuda"), mesh)
    assert caplog.messages == []
