"""``opensora-sp doctor --device``: passes on a CPU and finds faults."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planted_kernels import plant

from opensora_sp.cli import main
from opensora_sp.models import attention
from opensora_sp.models.attention_table import KERNELS
from opensora_sp.models.kernels import examples
from opensora_sp.models.registry import VARIANTS
from opensora_sp.runtime.doctor import device
from opensora_sp.runtime.doctor.device import Finding, Setup, setup_for

CPU = Setup(torch.device("cpu"), num_ranks=2)


def verdicts(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding("a", 0.5), "ok"),
        (Finding("a", 1.5), "FAIL"),
        (Finding("a", math.nan), "FAIL"),
        (Finding("a", math.inf), "FAIL"),
        (Finding("a", note="no"), "FAIL"),
        (Finding("a", note="one GPU", is_skipped=True), "skip"),
    ],
)
def test_verdicts_and_json(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    assert json.loads(json.dumps(finding.to_dict(), allow_nan=False))["verdict"] == verdict


@pytest.mark.parametrize("name", VARIANTS)
def test_models_agree_with_themselves(name: str) -> None:
    findings = list(device.check_model(name, CPU))
    assert [finding.verdict for finding in findings] == ["ok", "ok"]
    assert all(0.0 < finding.got <= 1.0 for finding in findings)


def test_one_wrong_gradient_of_a_model_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrong = device.step, "spatial_blocks.1.attn.qkv.weight"

    def step(model, inputs):
        results = plain(model, inputs)
        if inputs["x"].dtype == torch.bfloat16:
            calls.append(1)
            if len(calls) == 2:  # the first is the CPU's
                results[wrong] = results[wrong] * 1.2
        return results

    calls: list[int] = []
    monkeypatch.setattr(device, "step", step)
    findings = list(device.check_model("STDiT3", CPU))
    assert [finding.verdict for finding in findings] == ["ok", "FAIL"]
    assert findings[-1].note.startswith(wrong)


def test_attention_backends_and_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = attention.explicit_softmax
    monkeypatch.setattr(attention, "explicit_softmax", lambda q, k, v: 1.1 * wrong(q, k, v))
    expected = dict.fromkeys(KERNELS, "skip") | {"sdpa": "ok", "reference": "FAIL"}
    for name, verdict in expected.items():
        for dtype in ("float32", "bfloat16"):
            found = verdicts(device.check_attention(name, dtype, CPU))
            assert found == {f"attention {name}, {dtype}": verdict}


@pytest.mark.slow
def test_strategies_on_two_ranks() -> None:
    labels = [f"strategy {name}, 2 ranks" for name in device.STRATEGIES]
    assert verdicts(device.check_strategies(CPU)) == dict.fromkeys(labels, "ok")


def test_ranks_that_do_not_answer_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "TIMEOUT", 0.5)
    monkeypatch.setattr(device, "CHECKS", {"ranks": device.check_strategies})
    (finding,) = device.Examination(CPU).run()
    assert finding.verdict == "FAIL" and "no answer within" in finding.note


def raising(setup: Setup) -> Iterator[Finding]:
    yield Finding("before", 0.5)
    raise RuntimeError("CUDA error: an illegal memory access\nand a page of advice")


def passing(setup: Setup) -> Iterator[Finding]:
    yield Finding("after", 0.5)


def test_a_failing_check_stops_no_other_and_sets_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHECKS", {"wrong": raising, "right": passing})
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--device", "cpu"])
    table = capsys.readouterr().out

    assert left.value.code == 1
    assert "RuntimeError: CUDA error: an illegal memory access\n" in table and "advice" not in table
    assert "after" in table and "1 of 3 findings failed" in table

    monkeypatch.setattr(device, "CHECKS", {"right": passing})
    main(["doctor", "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["device"] and report["facts"]["torch"] == torch.__version__
    expected = {"name": "after", "got": 0.5, "verdict": "ok", "note": ""}
    assert report["findings"][0].items() >= expected.items()


def stopping(setup: Setup) -> Iterator[Finding]:
    yield Finding("in time", 0.5)
    raise KeyboardInterrupt


def test_a_run_that_is_stopped_leaves_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "CHECKS", {"right": passing, "slow": stopping})
    file = tmp_path / "doctor.json"
    with pytest.raises(SystemExit):
        main(["doctor", "--device", "cpu", "--json", str(file)])
    report = json.loads(file.read_text())
    assert [finding["name"] for finding in report["findings"]] == ["after", "in time"]
    assert not report["complete"] and not report["ok"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "CPU, 2 ranks" and lines[2].split() == ["after", "0.5", "ok"]
    assert lines[3].split()[:2] == ["in", "time"] and len(lines) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="got --device cuda, and torch sees no GPU; expected"):
        setup_for("cuda")


def test_kernels_need_a_gpu() -> None:
    (finding,) = device.check_kernel("gelu", CPU)
    assert finding.verdict == "skip"


@pytest.mark.parametrize("fault, verdict", [("none", "ok"), ("gradient", "FAIL")])
def test_kernels_are_compared_with_their_references(
    fault: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "EXAMPLES", dict(examples.EXAMPLES))
    plant(fault)
    monkeypatch.setattr(device, "obstacle", lambda device: None)
    real = device.verify_kernel
    monkeypatch.setattr(device, "verify_kernel", lambda *args: real(*args[:3], CPU.device))
    setup = Setup(torch.device("cuda"), num_ranks=1)
    assert verdicts(device.check_kernel("planted", setup)) == {"kernel planted": verdict}
