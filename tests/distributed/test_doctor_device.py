"""``opensora-sp doctor --device``: passes on a CPU and finds faults."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planted_kernels import plant
from ranks import run_ranks

from opensora_sp.cli import main
from opensora_sp.models import attention
from opensora_sp.models.kernels import examples
from opensora_sp.models.registry import VARIANTS
from opensora_sp.runtime.doctor.device import Finding, Setup, examination, one_device, setup_for
from opensora_sp.runtime.doctor.device import ranks as rank_checks

CPU = Setup(torch.device("cpu"), num_ranks=2, small=True)


def verdicts(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding("a", 1.0, 2.0), "ok"),
        (Finding("a", 3.0, 2.0), "FAIL"),
        (Finding("a", 3.0, 2.0, at_least=True), "ok"),
        (Finding("a", 1.0, 2.0, at_least=True), "FAIL"),
        (Finding("a", math.nan, 2.0), "FAIL"),
        (Finding("a", math.inf, 2.0, at_least=True), "FAIL"),
        (Finding.of_error("a", ValueError("no\nmore")), "FAIL"),
        (Finding.skip("a", "one GPU"), "skip"),
    ],
)
def test_verdicts_and_json(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    assert json.loads(json.dumps(finding.to_dict(), allow_nan=False))["verdict"] == verdict


@pytest.mark.parametrize("name", VARIANTS)
def test_models_agree_with_themselves(name: str) -> None:
    found = list(one_device.check_model(name, CPU))

    assert [finding.verdict for finding in found] == ["ok"] * 4
    # On CPU both sides are the same; an error of 1 is that of a dtype's roundings.
    assert all(0.0 < finding.got <= 1.0 for finding in found)


def test_one_wrong_gradient_of_a_model_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrong = one_device.step, "spatial_blocks.1.attn.qkv.weight"

    def step(model, inputs):
        results = plain(model, inputs)
        if inputs["x"].dtype == torch.bfloat16:
            calls.append(1)
            if len(calls) == 2:  # the first is the CPU's
                results[wrong] = results[wrong] * 1.2
        return results

    calls: list[int] = []
    monkeypatch.setattr(one_device, "step", step)
    found = list(one_device.check_model("STDiT3", CPU))

    assert [finding.verdict for finding in found] == ["ok", "ok", "ok", "FAIL"]
    assert found[-1].note.startswith(wrong)


def test_attention_backends_and_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = attention.explicit_softmax
    monkeypatch.setattr(attention, "explicit_softmax", lambda q, k, v: 1.1 * wrong(q, k, v))
    found = verdicts(one_device.check_attention(CPU))
    for dtype in ("float32", "bfloat16"):
        for name in ("short_rows", "flash", "flash3", "cudnn"):
            assert found.pop(f"attention {name}, {dtype}") == "skip"
        assert found.pop(f"attention sdpa, {dtype}") == "ok"
        assert found.pop(f"attention reference, {dtype}") == "FAIL"
    assert not found


def rank_findings(sabotage: bool) -> list[dict[str, str]]:
    """On each rank: findings of all checks of ranks, and of ZeRO's where gradients are wrong."""
    if sabotage:
        plain = rank_checks._sample
        rank_checks._sample = lambda inputs, rank: plain(inputs, 0)
        from opensora_sp.plugin.zero_optimizer import SequenceZeroOptimizer

        SequenceZeroOptimizer.step = lambda self: None
        return [verdicts(rank_checks.check_zero(CPU))]
    return [verdicts(check(CPU)) for check in rank_checks.RANK_CHECKS.values()]


@pytest.mark.slow
def test_zero_strategies_and_links_on_two_ranks() -> None:
    for zero, strategies, links in run_ranks(2, rank_findings, False):
        assert zero == {"ZeRO 1, 2 ranks": "ok", "ZeRO 2, 2 ranks": "ok"}
        assert strategies == {f"strategy {name}, 2 ranks": "ok" for name in rank_checks.STRATEGIES}
        assert links == {"all-to-all, gloo": "ok"}


@pytest.mark.slow
def test_a_step_that_zero_does_not_take_is_found() -> None:
    for (zero,) in run_ranks(2, rank_findings, True):
        assert zero == {"ZeRO 1, 2 ranks": "FAIL", "ZeRO 2, 2 ranks": "FAIL"}


def test_ranks_that_do_not_answer_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_checks, "TIMEOUT", 0.5)

    (found,) = rank_checks.check_ranks(CPU)

    assert found.verdict == "FAIL" and "no answer within" in found.note


def raising(setup: Setup) -> Iterator[Finding]:
    yield Finding("before", 1.0, 2.0)
    raise RuntimeError("CUDA error: an illegal memory access\nand a page of advice")


def passing(setup: Setup) -> Iterator[Finding]:
    yield Finding("after", 1.0, 2.0)


def test_a_failing_check_stops_no_other_and_sets_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "CHECKS", {"wrong": raising, "right": passing})
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--device", "cpu"])
    table = capsys.readouterr().out

    assert left.value.code == 1
    assert "RuntimeError: CUDA error: an illegal memory access\n" in table and "advice" not in table
    assert "after" in table and "1 of 3 findings failed" in table

    monkeypatch.setattr(examination, "CHECKS", {"right": passing})
    main(["doctor", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["facts"]["torch"] == torch.__version__
    assert (
        found["findings"][0] | {"name": "after", "got": 1.0, "bound": 2.0, "verdict": "ok"}
        == found["findings"][0]
    )


def stopping(setup: Setup) -> Iterator[Finding]:
    yield Finding("in time", 1.0, 2.0)
    raise KeyboardInterrupt


def test_a_run_that_is_stopped_leaves_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examination, "CHECKS", {"right": passing, "slow": stopping})
    file = tmp_path / "doctor.json"
    outputs = []
    for options in ([str(file)], []):
        with pytest.raises(SystemExit):
            main(["doctor", "--device", "cpu", "--json", *options])
        outputs.append(capsys.readouterr().out)
    for text in (file.read_text(), outputs[1]):
        found = json.loads(text)
        assert [one["name"] for one in found["findings"]] == ["after", "in time"]
        assert not found["complete"] and not found["ok"]
    lines = outputs[0].splitlines()
    assert lines[0] == "CPU, 2 ranks" and lines[2].split() == ["after", "1", "<=", "2", "ok"]
    assert lines[3].split()[:2] == ["in", "time"] and len(lines) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ValueError,
        match="got --device cuda, and torch sees no GPU; expected .*; look at the driver",
    ):
        setup_for("cuda")


def test_kernels_need_a_gpu() -> None:
    found = [verdicts(check(CPU)) for check in one_device.KERNEL_CHECKS.values()]
    assert found and all(set(one.values()) == {"skip"} for one in found)


@pytest.mark.parametrize("fault, verdict", [("none", "ok"), ("gradient", "FAIL")])
def test_kernels_are_compared_with_their_references(
    fault: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "EXAMPLES", dict(examples.EXAMPLES))
    plant(fault)
    monkeypatch.setattr(one_device, "obstacle", lambda device: None)
    real = one_device.verify_kernel
    monkeypatch.setattr(one_device, "verify_kernel", lambda *args: real(*args[:3], CPU.device))
    setup = Setup(torch.device("cuda"), num_ranks=1)
    found = verdicts(one_device.check_kernel("planted", setup))
    assert found == dict.fromkeys(["kernel planted, float32", "kernel planted, bfloat16"], verdict)
