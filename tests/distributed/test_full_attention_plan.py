"""The plan of a transformer of diffusers against steps that ranks make: bytes sent and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from random_weights import draw_weights
from ranks import run_ranks

from opensora_sp.cli import main
from opensora_sp.parallel import CommLedger, SequenceMesh, parallelize
from opensora_sp.planner.full_attention import INPUTS, Batch, build, estimate
from opensora_sp.planner.live_peak import LivePeak

WAN = dict(num_attention_heads=3, attention_head_dim=16, ffn_dim=96, num_layers=2, text_dim=24)
FLUX = dict(
    num_attention_heads=5,
    attention_head_dim=16,
    num_layers=1,
    num_single_layers=2,
    joint_attention_dim=24,
    pooled_projection_dim=24,
    axes_dims_rope=(8, 4, 4),
)
MODELS = {"WanTransformer3DModel": WAN, "FluxTransformer2DModel": FLUX}
BATCH = Batch(2, 9, 192, 336, 21)


def measured(name: str, checkpointing: bool) -> tuple[list[int], int, int]:
    """Bytes sent in forward and in backward, those of tensors saved for backward, and live ones
    after forward.
    """
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**MODELS[name])
    draw_weights(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    parallelize(model, SequenceMesh(dist.get_world_size()))
    inputs = INPUTS[name](model.config, BATCH)
    known = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    # What blocks receive is kept from the second pass on.
    for _ in range(2):
        saved.clear()
        live, counter = LivePeak(), CommLedger()
        with counter, live:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = model(**inputs, return_dict=False)[0].square().mean()
            after_forward, num_saved = live.live, sum(saved.values())
            loss.backward()
    counted = {key: number for key, number in counter.bytes.items() if key[0] != "check"}
    assert {phase for _, phase in counted} <= {"forward", "backward"}
    sent = [
        sum(number for (_, name), number in counted.items() if name == phase)
        for phase in ("forward", "backward")
    ]
    return sent, num_saved, after_forward


def all_measured() -> dict[Any, Any]:
    return {(name, way): measured(name, way) for name in MODELS for way in (False, True)}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_sent_are_equal_and_saved_bytes_within_15_percent(ranks: int) -> None:
    of_last_rank = run_ranks(ranks, all_measured)[-1]
    for (name, checkpointing), (sent, saved, live) in of_last_rank.items():
        planned = estimate(
            build(name, MODELS[name]),
            BATCH,
            gpus=ranks,
            ranks=ranks,
            dtype=torch.float32,
            checkpointing=checkpointing,
        )
        case = name, checkpointing
        assert [planned.forward, planned.backward] == sent, case
        assert planned.saved == pytest.approx(live, rel=0.15), case
        if not checkpointing:
            assert planned.saved == pytest.approx(saved, rel=0.15), case
        assert (planned.kept > 0) == checkpointing
        assert planned.peak.activations >= planned.saved


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder gives the numbers of its class; adapters need less memory and send the same."""
    build("WanTransformer3DModel", WAN).save_config(tmp_path)
    command = ["plan", str(tmp_path), "--gpus", "6", "--sp-size", "3", "--size", "192", "336"]
    main([*command, "--json"])
    steps = json.loads(capsys.readouterr().out)
    assert [(step["lora"], step["checkpointing"]) for step in steps] == [
        (None, False),
        (None, True),
        (16, False),
        (16, True),
    ]
    assert len({step["forward"] for step in steps}) == 1
    full, _, adapters, _ = (step["peak"]["total"] for step in steps)
    assert adapters < full

    main([*command, "--memory-gb", "0.001", "--cfg-options", "num_layers=1"])
    table = capsys.readouterr().out
    assert "WanTransformer3DModel" in table and "dp_size 2 x sp_size 3" in table
    assert table.count("too much") == 4 and max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize(
    "options, expected",
    [
        (["AutoencoderKL"], "got a model of class AutoencoderKL; expected one of"),
        (["WanTransformer3DModel", "--size", "480", "836"], "expected multiples of 16"),
        (["WanTransformer3DModel", "--frames", "0"], "with a number below 1; expected"),
        (["WanTransformer3DModel", "--gpu", "H100"], "with --gpu; expected --gpus, and none"),
        (["WanTransformer3DModel", "--cfg-options", "a.b=1"], "config of WanTransformer3DModel"),
        (["WanTransformer3DModel", "--cfg-options", "num_layers=x"], "from which it cannot be"),
    ],
)
def test_refusals(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *options, "--gpus", "2"])
    assert expected in capsys.readouterr().err.replace("\n", " ")
