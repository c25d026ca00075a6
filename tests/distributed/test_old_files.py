"""A checkpoint and a feature cache of an earlier version load, and training has the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from golden_values import GOLDEN
from ranks import run_ranks
from runs import write_toy_set
from safetensors.torch import load_file
from worlds import TRAINING, in_worlds

from opensora_sp.checkpoint import from_pretrained, verify
from opensora_sp.config import load_train_config
from opensora_sp.data import CachedFeatures
from opensora_sp.features.cached import check_cache
from opensora_sp.training.metrics import read_metrics

CHECKPOINT = GOLDEN / "old_checkpoint" / "step_00000002"
CACHE = GOLDEN / "old_feature_cache"
CONFIG = GOLDEN / "old_checkpoint" / "config.py"
FROM_CACHE = ["dataset.type=CachedFeatures", f"dataset.path={CACHE}", "dataset.manifest=None"]


def resume(outputs: Path, sp_size: int) -> None:
    """The two steps after the old checkpoint, on features of the old cache."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    options = [*FROM_CACHE, f"sp_size={sp_size}", f"outputs={outputs}"]
    train(load_train_config(CONFIG, options), resume="auto")


def resume_in_all(folders: dict[int, Path]) -> None:
    cases = [(sp_size, (folder, sp_size)) for sp_size, folder in folders.items()]
    in_worlds(resume, cases, TRAINING)


@pytest.mark.slow
def test_training_resumes_with_the_losses_of_the_old_version(tmp_path: Path) -> None:
    """From weights, EMA weights, optimizer state and position in the data of the old checkpoint."""
    folders = {sp_size: tmp_path / f"sp_size {sp_size}" for sp_size in (1, 2)}
    for folder in folders.values():
        shutil.copytree(CHECKPOINT, folder / CHECKPOINT.name)

    run_ranks(2, resume_in_all, folders)

    recorded = json.loads((GOLDEN / "old_checkpoint" / "losses.json").read_text())
    for folder in folders.values():
        losses = {str(line["step"]): line["loss"] for line in read_metrics(folder)}
        assert losses == pytest.approx(recorded, rel=1e-5)

        state = json.loads((folder / "step_00000004" / "state.json").read_text())
        old_state = json.loads((CHECKPOINT / "state.json").read_text())
        added = {"accumulation_steps", "kernels", "loss_weight", "manifest_columns"}
        assert state.keys() == old_state.keys() | added


@pytest.mark.parametrize("ema", [False, True])
def test_a_model_is_built_from_the_old_checkpoint(ema: bool) -> None:
    verify(CHECKPOINT)

    model = from_pretrained(CHECKPOINT, ema=ema)

    stored = load_file(CHECKPOINT / ("ema" if ema else "model") / "model.safetensors")
    assert model.state_dict().keys() == stored.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def test_the_old_cache_is_the_one_that_its_config_asks_for(tmp_path: Path) -> None:
    """The fingerprint of encoders, cropping and manifest is computed today as it was then."""
    manifest = write_toy_set(tmp_path, 9)
    cache = CachedFeatures(str(CACHE))

    check_cache(load_train_config(CONFIG, [f"dataset.manifest={manifest}"]), cache)

    fewer = write_toy_set(tmp_path / "fewer", 8)
    with pytest.raises(ValueError, match=r"dataset\.manifest"):
        check_cache(load_train_config(CONFIG, [f"dataset.manifest={fewer}"]), cache)
