"""``opensora-sp verify`` on a shipped config, and what it says of results that differ."""

from __future__ import annotations

import pytest
import torch
from runs import ROOT

from opensora_sp.cli import main, verify
from opensora_sp.config import load_train_config
from opensora_sp.models.quantized import Int8Linear
from opensora_sp.parallel.parity import Verdict
from opensora_sp.parallel.strategies import SwitchRows
from opensora_sp.training.sp_verification import (
    config_strategy,
    small_batch,
    small_model,
    small_shape,
)

DEMO = ROOT / "configs/demo/train.py"


def test_what_is_made_small() -> None:
    cfg = load_train_config(DEMO, ["num_frames=14", "batch_size=7", "image_size=(96, 120)"])
    assert small_shape(cfg, 2, 10**6) == (3, 7, 4, 5)
    # Whole samples stay whole.
    assert small_shape(cfg, 7, 10**6)[0] == 7 and small_shape(cfg, 3, 10**6)[0] == 2
    image = load_train_config(DEMO, ["num_frames=1", "batch_size=5", "image_size=(192, 192)"])
    for ranks, batch in [(2, 3), (5, 5), (8, 5)]:  # two on eight would split heads, five switch
        small = small_shape(image, ranks, 64)
        assert small[0] == batch and config_strategy(image, ranks, small) is config_strategy(
            image, ranks, (5, 1, 8, 8)
        )
    B, frames, height, width = small_shape(cfg, 2, 100)
    assert (B, frames) == (3, 7) and frames * height * width <= 100


def test_a_difference_is_reported_with_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wrong = Verdict(output=1e-12, gradients={"a": 1e-12, "b": 0.5}, all_zero=("c",), tolerance=1e-8)
    compared = (1, 2, 3, 4), SwitchRows, wrong
    monkeypatch.setattr(verify, "verify_config", lambda *_, **__: compared)

    with pytest.raises(SystemExit) as left:
        main(["verify", str(DEMO), "--ranks", "2"])
    reported = capsys.readouterr().out
    assert left.value.code == 1 and "NOT EQUAL" in reported
    assert reported.index("5.0e-01  b") < reported.index("1.0e-12  a")

    nan = Verdict(output=float("nan"), gradients={}, all_zero=(), tolerance=1e-8)
    assert not nan.agrees and "NOT EQUAL" in verify.report(nan)


def test_the_adapters_of_an_int8_base_are_verified_on_it() -> None:
    lora = ["load=x", "lora.rank=2", "lora.quantize=int8"]
    cfg = load_train_config(DEMO, lora)
    shape = small_shape(cfg, 2, 32)
    model = small_model(cfg, 1, shape)
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    model(**small_batch(model, shape)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad.any() and grad.dtype == torch.float64 for grad in gradients)


def test_one_rank_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["verify", str(DEMO), "--ranks", "1"])
    assert left.value.code == 2
    assert "got sp_size 1 to verify; expected at least 2 ranks" in capsys.readouterr().err
