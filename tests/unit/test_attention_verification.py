"""Kernels of attention are compared on a device before a run takes them, and replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opensora_sp import device_verification as verification
from opensora_sp.config import load_train_config
from opensora_sp.device_verification import choose_attention
from opensora_sp.models import attention as module
from opensora_sp.models.attention import choose_backends, set_refused
from opensora_sp.models.attention_table import HOPPER, KINDS, Platform, Sequences
from opensora_sp.models.kernels import verification as kernel_verification
from opensora_sp.models.kernels.verification import compare

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
LENGTHS = {"spatial": [256, 405], "temporal": [64], "cross": [20]}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def model(width: int = 72, attention: Any = "auto", trained: bool = True) -> Any:
    config = SimpleNamespace(
        hidden_size=width, num_heads=1, model_max_length=20, alternates=True, attention=attention
    )
    return SimpleNamespace(
        config=config, parameters=lambda: [torch.zeros(1, requires_grad=trained)]
    )


class WrongQueries(torch.autograd.Function):
    """The identity, whose gradient is wrong by a tenth."""

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.5 * grad


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Attend]]:
    """By name of a kernel, what computes it on a "Hopper GPU", which is the CPU.

    What is not planted is right. Remembers the kernels that were compared, in ``"compared"``.
    """
    faults: dict[str, Any] = {"compared": []}
    right = module._sdpa_rows

    def rows(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return faults.get(name, lambda *z: right(name, *z))(q, k, v)

    def on_cpu(kernel: Any, define: Any, example: Any, dtype: Any, device: Any) -> Any:
        faults["compared"].append((kernel.keywords["backend"].name, example.function))
        return compare(kernel, define, example, dtype, CPU)

    platform = Platform(HOPPER, cudnn=91501)
    monkeypatch.setattr(module, "_sdpa_rows", rows)
    monkeypatch.setattr(Platform, "of", lambda device, deterministic: platform)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(kernel_verification, "compare", on_cpu)
    monkeypatch.setattr(verification, "run_lengths", lambda *args: LENGTHS)
    monkeypatch.setattr(verification, "_check_device", lambda *args: None)
    module._choose.cache_clear()
    yield faults
    set_refused(())
    module._choose.cache_clear()


def choose(of: Any = None, dtype: torch.dtype = BF16) -> None:
    choose_attention(None, of or model(), dtype=dtype, device=CUDA)  # type: ignore[arg-type]


def taken(width: int = 72) -> dict[str, str]:
    """The kernel of each kind of attention, of long rows where there are some."""
    lengths = {"spatial": 405, "temporal": 64, "cross": 20}
    found = {}
    for kind in KINDS:
        one = Sequences(BF16, width, kind, lengths[kind], packed=kind == "cross")
        found[kind] = choose_backends("auto", {kind: one}, CUDA)[kind].name
    return found


def test_right_kernels_are_taken(planted: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    expected = {"spatial": "cudnn", "temporal": "sdpa", "cross": "sdpa"}
    choose()
    assert taken() == expected
    assert {name for name, _ in planted["compared"]} == {"cudnn", "sdpa"}
    # Compared once.
    assert len(planted["compared"]) == len(set(planted["compared"]))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_wrong_gradient_of_queries_at_one_head_width_is_found(
    planted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As FlashAttention-4 has it at a width of 72 on Hopper GPUs."""
    explicit = module.explicit_softmax

    def wrong_at_72(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return explicit(WrongQueries.apply(q) if q.shape[-1] == 72 else q, k, v)

    planted["cudnn"] = wrong_at_72
    choose(model(64))
    assert taken(64)["spatial"] == "cudnn"
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]

    choose(model(72))
    assert taken() == dict.fromkeys(KINDS, "sdpa")
    (warning,) = (one.message for one in caplog.records if one.levelno >= logging.WARNING)
    assert "cuDNN: gradient of q in spatial attention over " in warning


def test_without_training_gradients_are_not_compared(planted: dict[str, Any]) -> None:
    explicit = module.explicit_softmax
    planted["cudnn"] = lambda q, k, v: explicit(WrongQueries.apply(q), k, v)
    choose(model(trained=False))
    assert taken()["spatial"] == "cudnn"


@pytest.mark.parametrize("fault", ["refuses", "no numbers where 128 leaves 64", "many rows"])
def test_the_next_row_of_the_table_is_taken(
    fault: str, planted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    explicit = module.explicit_softmax

    def faulty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fault == "refuses":
            raise RuntimeError("cuDNN Frontend error: No execution plans support the graph.")
        wrong = q.shape[1] % 128 == 64 if "128" in fault else len(q) > 200
        return explicit(q, k, v) * (float("nan") if wrong else 1)

    planted["cudnn"] = faulty
    choose()
    assert taken() == dict.fromkeys(KINDS, "sdpa")
    (warning,) = (one.message for one in caplog.records if one.levelno >= logging.WARNING)
    assert "(cuDNN: " in warning and "replaced by others" in warning


def test_all_kernels_of_a_kind_may_fail(planted: dict[str, Any]) -> None:
    """The definition itself remains."""
    for name in ("cudnn", "sdpa"):
        planted[name] = lambda q, k, v: 2 * module.explicit_softmax(q, k, v)
    choose()
    assert set(taken().values()) == {"reference"}


def test_a_kernel_that_the_config_names_is_required(planted: dict[str, Any]) -> None:
    planted["cudnn"] = lambda q, k, v: 2 * module.explicit_softmax(q, k, v)
    with pytest.raises(ValueError, match="got attention 'cudnn' for spatial attention, which is"):
        choose(model(attention={"spatial": "cudnn"}))


def test_nothing_is_compared_on_a_cpu(planted: dict[str, Any]) -> None:
    choose_attention(None, model(), dtype=BF16, device=CPU)  # type: ignore[arg-type]
    assert not planted["compared"]


def test_cases_have_odd_lengths_empty_samples_and_single_keys() -> None:
    cases = list(kernel_verification.cases_of(model().config, LENGTHS, BF16, trained=True))
    rows = {one.sequences.length for one in cases if one.sequences.kind == "spatial"}
    assert {256, 405, 704, 1590} <= rows
    queries, keys = zip(
        *(one.example.arguments["lengths"] for one in cases if one.sequences.kind == "cross"),
        strict=True,
    )
    assert any(0 in one for one in queries) and any(1 in one for one in keys)
    assert any(len(set(one)) == 1 for one in queries)


def test_lengths_are_those_of_the_run() -> None:
    cfg = load_train_config("configs/stdit3/train/64x512x512_sp8.py")
    found = verification.run_lengths(cfg, cfg.model_spec.config)
    assert found == {"spatial": [1024], "temporal": [64], "cross": [300]}
