"""Cost models: presets, files, what is refused, and which one a config and a device have."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from opensora_sp.cli import main
from opensora_sp.config import load_inference_config
from opensora_sp.parallel.cost_model import CPU, H100, H200, CostModel
from opensora_sp.planner.calibration import fitted_link
from opensora_sp.runtime.cost_models import (
    PRESETS,
    SHEETS,
    cost_model_of,
    preset_of,
    read_cost_model,
    write_cost_model,
)
from opensora_sp.runtime.rank_info import RankInfo, find_differences
from opensora_sp.sampling import requests
from opensora_sp.sampling.group_choice import choose_groups

CONFIG = "configs/stdit3/train/64x512x512_sp8.py"
FACTS: dict[str, Any] = dict(device="x", versions={}, date="2026-11-23")


def test_presets_are_found_by_name_and_by_device(monkeypatch):
    assert all(cost_model_of(name) is one for name, one in PRESETS.items())
    assert cost_model_of(None, default=H200) is H200
    assert preset_of("NVIDIA H200") is H200 and preset_of("NVIDIA H100 80GB HBM3") is H100
    assert preset_of("Some GPU") is H100 and preset_of(None) is CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cost_model_of(None) is CPU


@pytest.mark.parametrize(
    ("device", "preset", "memory"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 40e9),
        ("NVIDIA A100 80GB PCIe", "A100-80GB", 80e9),
        ("NVIDIA L40S", "L40S", 48e9),
        ("NVIDIA GeForce RTX 5090", "RTX-5090", 32e9),
        ("NVIDIA H100 PCIe", "H100-PCIe", 80e9),
    ],
)
def test_gpus_have_the_shares_of_their_data_sheets(device, preset, memory):
    rates = preset_of(device)
    assert rates.name == preset and rates.memory == memory
    assert 0.5 < rates.flops / (SHEETS[preset].tflops * 1e12) < 0.9
    assert rates.attention_backward < rates.attention_forward < rates.flops


@pytest.mark.parametrize("name", PRESETS)
def test_dicts_and_files_hold_everything(name, tmp_path):
    mine = dataclasses.replace(PRESETS[name], flops=1e9 / 3, name="mine")
    assert CostModel.from_dict(json.loads(json.dumps(mine.to_dict()))) == mine

    path = tmp_path / "rates.json"
    write_cost_model(path, mine, FACTS)
    assert read_cost_model(path) == mine == cost_model_of(str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["rates.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": 0}, r"got flops=0 of the cost model 'CPU'; expected positive rates"),
        ({"flops": math.nan}, r"got flops=nan"),
        ({"latency": -1.0}, r"got latency=-1.0 of the cost model"),
        ({"flops": "fast"}, r"got a cost model with other \['flops'\]; expected names and values"),
        ({"flops": True}, r"got a cost model with other \['flops'\]"),
        ({"attention_tile": [1, 1, 1]}, r"got a cost model with other \['attention_tile'\]"),
        ({"speed": 1}, r"got a cost model with other \['speed'\]"),
    ],
)
def test_other_rates_are_refused(change, message, tmp_path):
    path = tmp_path / "rates.json"
    values = {"cost_model": {**CPU.to_dict(), **change}, **FACTS}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        read_cost_model(path)


def test_missing_rates_and_other_files_are_refused(tmp_path):
    path = tmp_path / "rates.json"
    with pytest.raises(ValueError, match="cannot be read .*or measure one with opensora-sp plan"):
        read_cost_model(path)

    for text in ("[]", "{}", json.dumps({"cost_model": CPU.to_dict()})):
        path.write_text(text)
        with pytest.raises(ValueError, match="without the keys of a cost model; .*measure"):
            read_cost_model(path)

    values = CPU.to_dict()
    del values["launch"]
    path.write_text(json.dumps({"cost_model": values, **FACTS}))
    with pytest.raises(ValueError, match=r"got a cost model with other \['launch'\]"):
        read_cost_model(path)
    path.write_text(" " * 70_000)
    with pytest.raises(ValueError, match="of more than 65,536 bytes"):
        read_cost_model(path)


def test_ranks_compare_all_rates():
    settings = H100.as_settings()
    assert len(settings) == len(dataclasses.fields(CostModel))
    differing = [name for name in settings if settings[name] != H200.as_settings()[name]]
    assert differing == ["cost_model.memory_bandwidth", "cost_model.memory", "cost_model.name"]

    joined = []
    for rank, rates in enumerate((H100, H100, dataclasses.replace(H100, latency=1e-5))):
        joined.append(RankInfo(rank, 3, "host", settings=rates.as_settings()))
    assert not find_differences(joined[:2])
    message = find_differences(joined)
    assert "got different settings: cost_model.latency" in message and "1e-05" in message


def test_sampling_shares_a_batch_where_links_are_fast():
    cfg = load_inference_config("configs/stdit3/inference/64x512x512.py")
    cfg = cfg.model_copy(update={"scheduler": {"type": "rflow", "cfg_scale": 1.0}})
    asked = requests.requests_of(cfg, ["a", "b", "c", "d", "e"])
    slow = dataclasses.replace(H100, bandwidth=1e6)
    assert choose_groups(cfg, asked, 4).sp_size == 4
    assert choose_groups(cfg, asked, 4, cost_model=slow).sp_size == 1


def test_a_line_through_exchanges_gives_bandwidth_and_latency():
    sent = [1e3, 1e5, 1e7]
    link = fitted_link(sent, [2e-4 + num_bytes / 5e8 for num_bytes in sent])
    assert link == pytest.approx((5e8, 2e-4))
    # Noise may turn the line around.
    bandwidth, latency = fitted_link(sent, [3e-4, 2e-4, 1e-4])
    assert bandwidth == 1e7 / 1e-4 and latency >= 0


def test_plan_says_what_it_lacks(tmp_path, capsys):
    in_a_file = tmp_path / "file"
    in_a_file.touch()
    for arguments, message in (
        ([], "got no CONFIG; expected a config to plan"),
        (["--calibrate", str(in_a_file / "rates.json")], "is no folder that can be written"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["plan", *arguments])
        assert end.value.code == 2 and message in capsys.readouterr().err
