"""What a run measures and reports: numbers and traces."""

from __future__ import annotations

import gzip
import json
import re
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import TRAIN, write_toy_set
from torch.utils.flop_counter import FlopCounterMode
from worlds import TRAINING, in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.models import build_model
from opensora_sp.parallel import CommTimer, SequenceMesh, parallelize
from opensora_sp.planner.seconds import ModelFlops
from opensora_sp.training.metrics import append_line, draw_loss, log_line, read_lines, read_metrics
from opensora_sp.training.preflight import preflight
from opensora_sp.training.profiling import Steps
from opensora_sp.training.step_log import Meter, known_peak, text_tokens

TINY = dict(
    in_channels=4, caption_channels=16, model_max_length=12, hidden_size=48, depth=2, num_heads=4
)
LATENTS = (2, 4, 4, 12, 10)
TEXT = torch.tensor([[1] * 5 + [0] * 7, [1] * 9 + [0] * 3])
SIZES = dict(num_frames=4.0, height=96.0, width=80.0, ar=1.2, fps=24.0)


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = dict(
        x=torch.randn(LATENTS, generator=generator),
        timestep=torch.tensor([3.0, 500.0]),
        y=torch.randn(2, 1, 12, 16, generator=generator),
        mask=TEXT,
    )
    return inputs | {name: torch.full((2,), SIZES[name]) for name in model.sample_inputs}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("STDiT3", {}),
        ("STDiT3", dict(kernel_size=(4, 4, -1), use_cond=True)),
        ("STDiT3", dict(full_attention=True)),
        ("STDiT2", {}),
        ("STDiT", dict(input_size=(4, 12, 10))),
    ],
)
def test_flops_are_those_that_torch_counts(name: str, more: dict) -> None:
    with torch.device("meta"):
        flops = ModelFlops.of(build_model(name, **TINY, **more))
    # torch sees the matrix products of this backend.
    model = build_model(name, **TINY, **more, attention="reference")
    with FlopCounterMode(display=False) as forward:
        output = model(**inputs_of(model))
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert flops.forward(LATENTS, 14) == pytest.approx(forward.get_total_flops(), rel=0.01)
    whole_step = forward.get_total_flops() + backward.get_total_flops()
    assert flops.step(LATENTS, 14) == pytest.approx(whole_step, rel=0.005)


def test_text_tokens_are_those_that_the_model_packs() -> None:
    model = build_model("STDiT3", **TINY)
    mask = torch.tensor([[1] * 5 + [0] * 7, [0] * 12, [1] * 9 + [0] * 3, [1] * 12])
    for drop in (None, torch.tensor([False, False, True, False])):
        _, lengths = model.y_embedder.pack(torch.zeros(4, 1, 12, 16), mask, drop)
        assert text_tokens(mask.sum(1).tolist(), drop, 12) == sum(lengths)


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Some GPU", "bf16", None),
    ],
)
def test_peaks_of_known_gpus(
    gpu: str, precision: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    assert known_peak(torch.device("cuda"), precision) == tflops
    assert known_peak(torch.device("cpu"), precision) is None


def measured(sp_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model, rank = build_model("STDiT3", **TINY), dist.get_rank()
    mesh, cpu = SequenceMesh(sp_size), torch.device("cpu")
    meter = Meter(model, cpu, mesh=mesh, peak_tflops=0.5)
    batch = types.SimpleNamespace(
        x_t=torch.zeros(LATENTS), text_lengths=TEXT.sum(1).tolist(), inputs=dict(drop_caption=None)
    )
    meter.count(batch)
    meter.count(batch)
    first = meter.measure(waited=rank * 0.4, steps=2, seconds=4.0, left=10)
    first["waits"] = meter.by_rank["data_wait"]
    return first, meter.measure(waited=0.0, steps=1, seconds=1.0, left=7)


def both_measured() -> list:
    return [measured(sp_size) for sp_size in (1, 2)]


def test_measures_are_of_all_ranks() -> None:
    work = 2 * ModelFlops.of(build_model("STDiT3", **TINY)).step(LATENTS, 14)  # of each replica
    for alone, together in run_ranks(2, both_measured):
        for replicas, (first, second) in ((2, alone), (1, together)):
            assert first["step_time"] == 2.0
            assert first["mfu"] == pytest.approx(replicas * work / (0.5e12 * 2 * 4.0))
            assert first["data_wait"] == pytest.approx(0.4 / 4.0) and first["communication"] == 0.0
            assert 0.05 < first["peak_memory_gb"] < 50 and first["eta"] == 20.0
            assert first["waits"] == pytest.approx([0.0, 0.4 / 4.0])
            # By the median of 1 s and 2 s a step.
            assert second["mfu"] == 0.0 and second["eta"] == 14.0


def timed_exchanges() -> list[float]:
    timer, rank = CommTimer(torch.device("cpu")), dist.get_rank()
    model = build_model("STDiT3", **TINY)
    parallelize(model, SequenceMesh(2))
    dist.barrier()
    with timer:
        time.sleep(0.5 * rank)
        model(**inputs_of(model))
    return [timer.take(), timer.take()]


def test_communication_time_is_waiting_for_others() -> None:
    (patient, nothing), (late, _) = run_ranks(2, timed_exchanges)
    assert nothing == 0.0 and patient > 0.4 and late < patient / 2


def train_once(
    config: Path, outputs: Path, options: list[str], resume: str | None, profile: str | None
) -> None:
    from opensora_sp.training import trainer
    from opensora_sp.training.run import train

    trainer.known_peak = lambda device, precision: 0.001
    said = [f"outputs={outputs}", "max_steps=6", "ckpt_every=2", *options]
    train(load_train_config(config, said), resume=resume, profile=profile)


def train_and_resume(config: Path, outputs: Path) -> None:
    heads = "sequence_parallel.strategy=ulysses"
    cases = [
        (config, outputs, ["max_steps=2"], None, None),
        (config, outputs, [], "auto", "3-4"),
        (config, outputs.parent / "other", ["max_steps=1", "sp_size=1"], None, "1"),
        (config, outputs.parent / "heads", ["max_steps=1", heads], None, "1"),
    ]
    in_worlds(train_once, [(2, case) for case in cases], TRAINING)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, and four more after a resume, two of them traced; and a run of one step."""
    folder = tmp_path_factory.mktemp("metrics")
    manifest = write_toy_set(folder / "set", 8)
    (folder / "config.py").write_text(TRAIN.format(manifest=str(manifest)))
    run_ranks(2, train_and_resume, folder / "config.py", folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_all_places_hold_the_same_numbers(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = read_metrics(trained)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    board = EventAccumulator(str(trained / "tensorboard")).Reload()
    names = set(lines[0]) - {"step"}
    assert set(board.Tags()["scalars"]) == names
    assert {"loss", "grad_norm", "lr", "step_time", "tokens_per_s", "mfu"} <= names
    assert {"peak_memory_gb", "data_wait", "communication", "eta"} <= names
    for name in names:
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines], (
            name
        )
    text = (trained / "train.log").read_text()
    for line in lines:
        assert log_line(line["step"], 2 if line["step"] <= 2 else 6, line, 0.001) in text
        assert 0 < line["communication"] < 1 and 0 <= line["data_wait"] < 1 and line["mfu"] > 0
    of_ranks = read_lines(trained / "ranks.jsonl")
    for line, one in zip(lines, of_ranks, strict=True):
        assert one["step"] == line["step"] and len(one["data_wait"]) == 2
        assert max(one["data_wait"]) == line["data_wait"]
        assert sum(one["communication"]) / 2 == pytest.approx(line["communication"])
    assert lines[-1]["eta"] == 0.0 and lines[2]["eta"] == pytest.approx(3 * lines[2]["step_time"])


def test_a_log_line_has_what_was_measured() -> None:
    values = dict(
        loss=0.25,
        grad_norm=1.5,
        lr=1e-4,
        step_time=0.5,
        tokens_per_s=12_345.0,
        peak_memory_gb=71.234,
    )
    values |= dict(data_wait=0.004, communication=0.081, eta=90_061.0)
    line = log_line(20, 1000, values | {"mfu": 0.412}, 989.0)

    assert line == (
        "step 20/1000 | loss 0.2500 | grad norm 1.5 | lr 1.00e-04 | 0.5 s/step | "
        "1.234e+04 tokens/s | MFU 41.2% of 989 TFLOP/s | 71.23 GB | "
        "waiting: data 0.4%, communication 8.1% | ETA 1 day, 1:01:01"
    )
    assert "MFU" not in log_line(20, 1000, values, None)
    del values["communication"]
    assert "waiting: data 0.4% | ETA" in log_line(20, 1000, values, None)


def test_the_plot_of_losses_has_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    for step in range(1, 21):
        append_line(tmp_path / "metrics.jsonl", {"step": step, "loss": 1.2 - step / 200})
    for step, loss in ((10, 1.25), (20, 1.21)):
        line = {"step": step, "loss": loss, "loss_by_bin": [loss]}
        append_line(tmp_path / "validation.jsonl", line)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    draw_loss(tmp_path)

    (axes,) = drawn[0].axes
    (heldout,) = [line for line in axes.lines if line.get_label() == "held-out"]
    assert heldout.get_xydata().tolist() == [[10, 1.25], [20, 1.21]]


def regions(path: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.slow
def test_traces_name_the_parts_of_a_step(trained: Path) -> None:
    """Two steps of two micro-batches, two pairs of blocks, recomputed; each rank writes a trace."""
    assert len(list((trained / "profile").iterdir())) == 2
    for rank in range(2):
        found = regions(trained / f"profile/steps_3-4.rank{rank}.json.gz")
        assert found["spatial"] == found["temporal"] == 2 * 2 * 2 * 2  # forward and recompute
        assert found["switch exchange"] == found["switch backward"] == 2 * 2 * 3
        assert all(found[name] == 2 * 2 for name in ("loss", "backward", "data", "encode"))
        assert found["optimizer"] == found["zero exchange"] == 2

    alone = regions(trained.parent / "other/profile/steps_1.rank0.json.gz")
    assert alone["spatial"] == 4 and alone["switch exchange"] == 0
    assert "switch backward" not in alone
    heads = regions(trained.parent / "heads/profile/steps_1.rank0.json.gz")
    # Two micro-batches, four blocks, to heads and back; recomputation exchanges again.
    assert heads["heads exchange"] == 2 * heads["heads backward"] == 2 * (2 * 4 * 2)


@pytest.mark.parametrize(("text", "steps"), [("3", Steps(3, 3)), ("10-12", Steps(10, 12))])
def test_steps_to_trace(text: str, steps: Steps) -> None:
    assert Steps.parse(text) == steps and str(steps) == text


@pytest.mark.parametrize("text", ["0", "x", "4-3", "1-", "1,2"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got --profile {text!r}; expected a step")):
        Steps.parse(text)


@pytest.mark.slow
def test_what_cannot_be_traced_is_reported_before_the_work(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained.parent / "config.py"
    monkeypatch.setenv("WORLD_SIZE", "2")
    fresh = load_train_config(config, [f"outputs={tmp_path}"])
    with pytest.raises(ValueError, match="got --profile 5-7, and a run of steps 1 to 6; expected"):
        preflight(fresh, None, Steps.parse("5-7"))

    resumed = load_train_config(config, [f"outputs={trained}", "max_steps=9"])
    with pytest.raises(ValueError, match="got --profile 6, and a run of steps 7 to 9"):
        preflight(resumed, "auto", Steps(6, 6))
