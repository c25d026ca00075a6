"""The choice of an attention's kernel: by the table, by a config's names, for each kind."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opensora_sp.checkpoint.model_config import (
    check_model_config,
    parse_model_config,
    write_model_config,
)
from opensora_sp.config.components import check_options
from opensora_sp.models import attention as module
from opensora_sp.models import build_model
from opensora_sp.models.attention_table import (
    HOPPER,
    Platform,
    Sequences,
    choose,
    names_by_kind,
)
from opensora_sp.models.registry import resolve_config
from opensora_sp.models.stdit_config import STDiT3Config

pytestmark = pytest.mark.core
BF16 = torch.bfloat16
CPU = Platform(None)
BARE = Platform(HOPPER)
CUDNN = replace(BARE, cudnn=91501)
ALL = replace(CUDNN, packages=("flash", "flash3"))
A100 = replace(ALL, capability=(8, 0))
SPATIAL = Sequences(BF16, 72, "spatial", 1024)
TEMPORAL = Sequences(BF16, 72, "temporal", 16)
CROSS = Sequences(BF16, 72, "cross", 300, packed=True)


@pytest.mark.parametrize(
    ("platform", "kernels"),
    [  # of spatial, temporal and cross-attention
        (ALL, "flash3 flash flash3"),
        (replace(ALL, packages=("flash",)), "cudnn flash flash"),
        (replace(ALL, packages=("flash",), cudnn=91500), "flash flash flash"),
        (replace(ALL, packages=("flash3",)), "flash3 sdpa flash3"),
        (CUDNN, "cudnn sdpa sdpa"),
        (BARE, "sdpa sdpa sdpa"),
        (replace(CUDNN, deterministic=True), "sdpa sdpa sdpa"),
        (replace(ALL, capability=(10, 0)), "cudnn flash flash"),
        (A100, "flash flash flash"),
        (replace(A100, packages=()), "sdpa sdpa sdpa"),
        (replace(ALL, capability=(7, 5)), "sdpa sdpa sdpa"),
        (CPU, "sdpa sdpa sdpa"),
    ],
    ids=str,
)
def test_each_kind_takes_its_kernel(platform: Platform, kernels: str) -> None:
    found = [choose("auto", sequences, platform) for sequences in (SPATIAL, TEMPORAL, CROSS)]
    assert [choice.kernel for choice in found] == kernels.split()
    assert all(choice.reason for choice in found)


@pytest.mark.parametrize(
    ("sequences", "kernel"),
    [
        (replace(SPATIAL, length=128), "flash"),
        (replace(SPATIAL, length=129), "flash3"),
        (replace(TEMPORAL, length=360), "flash3"),
        (replace(TEMPORAL, length=360, packed=True), "flash3"),
        (replace(SPATIAL, kind=None), "flash3"),  # a call without a kind
        (replace(SPATIAL, kind=None, length=None, packed=True), "flash3"),
        (replace(SPATIAL, head_width=36), "flash"),
        (replace(SPATIAL, head_width=264), "sdpa"),
        (replace(SPATIAL, dtype=torch.float16), "flash3"),
        (replace(SPATIAL, dtype=torch.float32), "sdpa"),
        (replace(SPATIAL, dtype=torch.float32, head_width=9), "reference"),
        (replace(SPATIAL, dtype=torch.float64), "reference"),
    ],
    ids=str,
)
def test_shapes_and_dtypes_decide(sequences: Sequences, kernel: str) -> None:
    assert choose("auto", sequences, ALL).kernel == kernel


SHORT = replace(TEMPORAL, short_rows=True)


@pytest.mark.parametrize(
    ("sequences", "kernel"),
    [
        (SHORT, "short_rows"),
        (replace(SHORT, length=2), "short_rows"),
        (replace(SHORT, length=32, head_width=128, dtype=torch.float32), "short_rows"),
        (replace(SHORT, kind="spatial"), "short_rows"),
        (replace(SHORT, length=33), "flash"),
        (replace(SHORT, head_width=136), "flash"),
        (replace(SHORT, packed=True), "flash"),
        (replace(SHORT, kind="cross"), "flash3"),
        (TEMPORAL, "flash"),
    ],
    ids=str,
)
def test_short_rows_take_their_kernel_once_it_was_verified(
    sequences: Sequences, kernel: str
) -> None:
    assert choose("auto", sequences, ALL).kernel == kernel


def test_reasons_say_what_is_missing() -> None:
    reason = choose("auto", SPATIAL, BARE).reason
    assert reason.startswith("flash-attn 3 is not installed; cuDNN 0.0.0 is older than 9.15.1; ")
    assert choose("auto", SPATIAL, CPU).reason == "the tensors are not on a GPU"
    assert "Hopper" in choose("auto", SPATIAL, ALL).reason


def test_a_kernel_that_failed_verification_is_passed_over() -> None:
    refused = replace(SPATIAL, refused=frozenset(["flash3", "cudnn"]))
    choice = choose("auto", refused, ALL)
    assert choice.kernel == "flash" and "cuDNN failed verification on this device" in choice.reason
    with pytest.raises(ValueError, match="got attention 'cudnn', but cuDNN failed verification"):
        choose("cudnn", refused, ALL)


@pytest.mark.parametrize(
    ("name", "platform", "problem"),
    [
        ("short_rows", ALL, "not verified on this device"),
        ("flash", BARE, "flash-attn is not installed"),
        ("flash3", A100, "made for compute capability 9.0"),
        ("flash3", CUDNN, "flash-attn 3 is not installed"),
        ("cudnn", replace(ALL, cudnn=90100), "cuDNN 9.1.0 is older than 9.15.1"),
        ("cudnn", replace(ALL, deterministic=True), "not deterministic"),
        ("flash", CPU, "not on a GPU"),
    ],
)
def test_a_kernel_asked_for_in_vain(name: str, platform: Platform, problem: str) -> None:
    match = f"got attention '{name}', but .*{problem}; expected .*; install .* attention='auto'"
    with pytest.raises(ValueError, match=match):
        choose(name, SPATIAL, platform)


def test_torchs_choice_builds_no_matrices() -> None:
    for dtype, width, kernel in (
        (torch.float64, 64, "reference"),
        (BF16, 36, "reference"),
        (BF16, 72, "sdpa"),
        (torch.float32, 36, "sdpa"),
    ):
        assert (
            choose("sdpa", replace(SPATIAL, dtype=dtype, head_width=width), BARE).kernel == kernel
        )
    assert choose("sdpa", Sequences(torch.float64, 5), CPU).kernel == "sdpa"


def test_a_config_names_kernels_by_kind() -> None:
    assert names_by_kind("sdpa") == dict(spatial="sdpa", temporal="sdpa", cross="sdpa")
    some = dict(temporal="reference")
    assert names_by_kind(some) == dict(spatial="auto", temporal="reference", cross="auto")
    with pytest.raises(ValueError, match=r"got attention .*space.*; expected a name for some of"):
        resolve_config("STDiT3", attention=dict(space="sdpa"))
    with pytest.raises(ValueError, match=r"got attention 'flsh'; expected one of .*; choose one"):
        resolve_config("STDiT3", attention=dict(spatial="flsh"))


def test_names_by_kind_are_a_setting_like_others(tmp_path: Path) -> None:
    """In configs, in ``config.json``, in copies, in sets; no property of the weights."""
    attention = dict(spatial="sdpa", cross="reference")
    assert check_options("model", dict(attention=attention), STDiT3Config)["attention"] == attention

    config = resolve_config("STDiT3", attention=attention)
    assert dataclasses.replace(config, depth=2).attention == attention
    assert {config: 1}[resolve_config("STDiT3", attention=dict(attention))] == 1

    write_model_config(tmp_path, "STDiT3", config)
    saved = json.loads((tmp_path / "config.json").read_text())
    name, values, _ = parse_model_config(saved, tmp_path)
    assert resolve_config(name, **values) == config
    check_model_config(tmp_path, "STDiT3", resolve_config("STDiT3"))


def kernels_of_the_second_step(
    attention: str | dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    asked: list[str] = []
    real = module._attend_rows
    monkeypatch.setattr(
        module,
        "_attend_rows",
        lambda backend, *qkv: asked.append(backend.name) or real(backend, *qkv),
    )
    options = dict(hidden_size=24, depth=1, num_heads=2, caption_channels=4, model_max_length=3)
    model = build_model("STDiT3", **options, attention=attention)
    numbers = {number: torch.tensor([8.0, 16.0]) for number in model.sample_inputs}
    x, y = torch.randn(2, 4, 3, 4, 4), torch.randn(2, 1, 3, 4)
    for _ in range(2):
        asked.clear()
        model(x, torch.tensor([10.0, 900.0]), y, **numbers)
    return asked


def test_each_attention_of_a_model_takes_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module._choose.cache_clear()
    module._log.cache_clear()
    with caplog.at_level(logging.INFO):
        found = kernels_of_the_second_step(dict(temporal="reference"), monkeypatch)

    assert found == ["sdpa", "sdpa", "reference", "sdpa"]  # with cross-attention in either block
    assert [record.message for record in caplog.records] == [
        "spatial attention: torch SDPA (the tensors are not on a GPU)",
        "temporal attention: explicit softmax (asked for)",
        "cross-attention: torch SDPA (the tensors are not on a GPU)",
    ]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, dict(spatial=(24, False), temporal=(5, False))),
        (dict(full_attention=True), dict(spatial=(120, True), temporal=(120, True))),
        (dict(kernel_size=(2, 4, -1)), dict(spatial=(24, False), temporal=(40, True))),
    ],
)
def test_lengths_of_sequences(options: dict, lengths: dict) -> None:
    config = resolve_config("STDiT3-XL/2", **options)
    found = config.sequences(config.grid(2, (5, 8, 12)), BF16)
    assert {kind: (found[kind].length, found[kind].packed) for kind in lengths} == lengths
    assert found["cross"] == Sequences(BF16, 72, "cross", 300, packed=True)


def test_a_model_without_temporal_blocks_has_no_kernel_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = resolve_config("STDiT3-XL/2", skip_temporal=True)
    assert list(config.sequences(config.grid(1, (16, 64, 64)), BF16)) == ["spatial", "cross"]

    module._choose.cache_clear()
    module._log.cache_clear()
    with caplog.at_level(logging.INFO):
        sequences = config.sequences(config.grid(2, (5, 8, 12)), BF16)
        module.choose_backends("auto", sequences, torch.device("cpu"))
    assert len(caplog.messages) == 2 and not any("temporal" in one for one in caplog.messages)
