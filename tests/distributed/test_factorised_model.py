"""A model of another project, in one file outside of the package, by all commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from derived_models import START
from ranks import run_ranks
from runs import BIN, ROOT, SAMPLE, TRAIN, losses, run_forked, write_toy_set

from opensora_sp.cli import main
from opensora_sp.models import build_model
from opensora_sp.models.registry import loaded_classes
from opensora_sp.parallel import SequenceMesh, parallelize, unwrap
from opensora_sp.parallel.parity import verify_step

NAME = "factorised_model.FactorisedModel"
HELPERS = Path(__file__).parents[1] / "helpers"
SMALL = dict(hidden_size=24, depth=2, num_heads=3, caption_channels=8, model_max_length=6)
WAYS: list[dict[str, Any]] = [
    {},
    dict(overlap_chunks=2, overlap_backward=True),
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]


def agrees_with_one_process() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    torch.manual_seed(0)
    model = build_model(NAME, **SMALL).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = dict(
        x=torch.randn(3, 4, 5, 6, 7, dtype=torch.float64),
        timestep=torch.tensor([900.0, 500.0, 0.0]).double(),
        y=torch.randn(3, 1, 6, 8, dtype=torch.float64),
        x_mask=torch.arange(5) > torch.tensor([[0], [1], [-1]]),
    )
    for levels in (False, True, (0, 3, 5, 6)):
        model.set_grad_checkpoint(levels)
        for options in WAYS:
            verdict = verify_step(parallelize(model, mesh, **options), (), inputs)
            assert verdict.agrees and not verdict.all_zero, (verdict, options, levels)
            unwrap(model)


def test_it_agrees_with_one_process() -> None:
    run_ranks(2, agrees_with_one_process)


def write_configs(folder: Path) -> None:
    """The model's file, a toy set and configs of runs."""
    manifest = write_toy_set(folder / "clips", 6)
    (folder / "factorised_model.py").write_text((HELPERS / "factorised_model.py").read_text())
    (folder / "start.py").write_text(START.format(folder=str(folder)))
    for file, text in {
        "train.py": TRAIN.format(manifest=str(manifest)),
        "sample.py": SAMPLE,
    }.items():
        (folder / file).write_text(text.replace('type="STDiT3"', f'type="{NAME}"'))


def test_it_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_configs(tmp_path)
    main(["plan", str(tmp_path / "train.py"), "--gpus", "2"])
    text = capsys.readouterr().out
    assert NAME in text and "GB at the peak" in text
    assert "FactorisedModel" in loaded_classes()


@pytest.mark.slow
def test_runs_by_config(tmp_path: Path) -> None:
    """It trains, resumes on other ranks, is adapted by LoRA, sampled and verified."""
    write_configs(tmp_path)

    def run(script: str, *arguments: str | Path, ranks: int) -> None:
        command = [tmp_path / "start.py", ROOT / "scripts" / script, *arguments]
        done = run_forked(*command, ranks=ranks, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]

    def train(outputs: str, steps: int, ranks: int, *more: str) -> list[float]:
        options = [f"outputs={tmp_path / outputs}", f"max_steps={steps}", f"sp_size={ranks}", *more]
        arguments = [tmp_path / "train.py", "--resume", "auto", "--cfg-options", *options]
        run("train.py", *arguments, "ckpt_every=1", ranks=ranks)
        return losses(tmp_path / outputs)

    alone = train("one", 3, 1)
    train("two", 1, 2)
    np.testing.assert_allclose(train("two", 3, 2), alone, rtol=5e-4)

    adapters = ["lora.rank=2", "lora.alpha=2", f"load={tmp_path / 'two'}"]
    assert len(train("lora", 2, 2, *adapters)) == 2

    outputs = tmp_path / "samples"
    options = [f"outputs={outputs}", "sp_size=2", "prompts=['a']"]
    weights = ["--ckpt", tmp_path / "two", "--lora", tmp_path / "lora"]
    run("inference.py", tmp_path / "sample.py", *weights, "--cfg-options", *options, ranks=2)
    assert next(outputs.glob("*.mp4")).stat().st_size > 0
    assert json.loads(next(outputs.glob("*a.json")).read_text())

    verdict = subprocess.run(
        [BIN / "opensora-sp", "verify", tmp_path / "train.py", "--depth", "1"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert verdict.returncode == 0 and "equal (allowed" in verdict.stdout, verdict.stderr
