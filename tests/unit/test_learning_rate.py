"""Optimizers by name in a config, and schedules of the learning rate and of the EMA weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import TRAIN

from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.training.trainable import (
    ShardedEma,
    check_optimizer,
    check_same_state,
    describe_schedule,
    ema_decay,
    learning_rate,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedule") / "train.py"
    path.write_text(TRAIN.format(manifest="clips.csv"))
    return path


def loaded(file: Path, *options: str) -> TrainConfig:
    return load_train_config(file, list(options))


def test_linear_decay_ends_at_zero_after_the_last_step(file: Path) -> None:
    options = ["warmup_steps=4", "max_steps=10", "lr_schedule=linear", "optimizer.lr=1.0"]
    cfg = loaded(file, *options)
    rates = [learning_rate(cfg, step) for step in range(11)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_the_decay_grows_unless_it_is_that_of_the_release() -> None:
    assert [ema_decay(0.9, step, warmup=True) for step in (0, 10, 1000)] == [0.1, 11 / 20, 0.9]
    assert ema_decay(0.9, 0, warmup=False) == 0.9

    weights = torch.zeros(1)
    ema = ShardedEma({"a": weights}, 0.9999, warmup=False)
    weights += 1
    ema.update(0, torch.tensor(True))
    assert ema.shards["a"].item() == pytest.approx(1e-4)


def test_log_and_plan_describe_the_schedule(file: Path) -> None:
    assert describe_schedule(loaded(file)) == [
        "optimizer: AdamW (exp_avg, exp_avg_sq), weight decay 0",
        "learning rate: 2 steps of warm-up, then constant at 0.001",
        "EMA weights: decay 0.999 (growing from 0.1)",
    ]
    options = ["lr_schedule=linear", "warmup_steps=0", "max_steps=0", "epochs=3"]
    options += ["ema_warmup=False", "optimizer=dict(type='SGD', lr=0.1, momentum=0.9)"]
    (file.parent / "other.py").write_text(file.read_text() + "optimizer = None\n")
    assert describe_schedule(loaded(file.parent / "other.py", *options)) == [
        "optimizer: SGD (momentum_buffer), weight decay 0",
        "learning rate: linear decay from 0.1 to 0 at the end of epoch 3",
        "EMA weights: decay 0.999",
    ]


def test_options_are_those_of_the_class(file: Path) -> None:
    options = ["optimizer.type=RMSprop", "optimizer.centered=True", "optimizer.momentum=0.5"]
    optimizer = loaded(file, *options).optimizer
    assert optimizer.options == dict(
        lr=1e-3, weight_decay=0.0, alpha=0.99, eps=1e-8, momentum=0.5, centered=True
    )
    assert optimizer.moments == ("square_avg", "momentum_buffer", "grad_avg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["type=Lion"], "got optimizer.type 'Lion'; expected an elementwise optimizer.*'AdamW'"),
        (["type=LBFGS"], r"'LBFGS' \(it needs products of whole gradients.*; expected an elem"),
        (["type=Adafactor"], r"\(its second moments are means over rows and columns\); expected"),
        (["type=Muon"], r"'Muon' \(it multiplies whole matrices\); expected an elementwise"),
        (["type=LAMB"], r"'LAMB' \(its step depends on the norm of a whole layer\); expected"),
        (["type=PagedAdamW8bit"], r"\(bitsandbytes needs a GPU, and rounds moments in blocks"),
        (["type=adamw"], "got optimizer.type 'adamw'.*did you mean 'AdamW'"),
        (["beta=(0.9,0.99)"], "unknown key 'optimizer.beta'.*did you mean 'betas'"),
        (["type=SGD", "eps=1e-8"], "unknown key 'optimizer.eps'; expected one of .*'nesterov'"),
        (["fused=True"], "unknown key 'optimizer.fused'; expected one of .'type', 'lr'"),
        (["betas=0.9"], r"got optimizer.betas = 0.9; .*change optimizer.betas"),
        (["type=SGD", "nesterov=5"], "got optimizer.nesterov = 5; "),
        (["lr=0"], "got optimizer.lr = 0; "),
    ],
)
def test_what_does_not_fit_is_refused(file: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(file, *(f"optimizer.{option}" for option in options))


def test_numbers_that_the_class_refuses_are_reported_before_the_run(file: Path) -> None:
    check_optimizer(loaded(file, "optimizer.type=SGD"))
    with pytest.raises(ValueError, match=r"torch.optim.AdamW takes \(Invalid beta parameter"):
        check_optimizer(loaded(file, "optimizer.betas=(2,0.9)"))
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        check_optimizer(loaded(file, "optimizer.type=SGD", "optimizer.nesterov=True"))


def test_another_optimizer_s_state_is_refused(file: Path) -> None:
    cfg, checkpoint = loaded(file, "optimizer.type=NAdam"), Path("run/step_00000003")
    check_same_state(cfg, cfg.optimizer.model_dump(mode="json"), checkpoint)
    check_same_state(loaded(file, "optimizer.type=Adam"), {"type": "HybridAdam"}, checkpoint)
    for other in ({"type": "SGD"}, {"type": "AdamW"}, {"type": "AdamW", "amsgrad": True}):
        with pytest.raises(ValueError, match="'NAdam' to resume from .* expected an optimizer"):
            check_same_state(cfg, other, checkpoint)
