"""``python -m benchmarks gpu_report``: complete under the stub of CUDA, one sentence without a GPU.

Times mean nothing under the stub, but the allocator's peaks are those of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_stub import requires_stub, run_on_stub

from benchmarks.__main__ import main
from benchmarks.gpu_report import SHAPES, known_gpu


def on_report() -> dict[str, Any]:
    import argparse

    from benchmarks import gpu_report

    parser = argparse.ArgumentParser()
    gpu_report.add_options(parser)
    return gpu_report.run(parser.parse_args(["--quick", "--repeats", "1", "--kernels", "torch"]))


@pytest.mark.slow
@requires_stub
def test_report_of_the_stub() -> None:
    recording = run_on_stub(on_report, timeout=600)
    report = recording.result
    assert report["device"].startswith("NVIDIA H200")
    assert {"host to device", "device to device", "bf16 matrix product"} == {
        row["ceiling"] for row in report["ceilings"]
    }

    chosen = [row for row in report["attention"] if row["kernel"] == "auto"]
    assert len(chosen) == 2 * len(SHAPES)
    assert all(row["forward ms predicted"] < row["backward ms predicted"] for row in chosen)

    assert [row["shape"] for row in report["steps"]] == [shape.name for shape in SHAPES]
    for row in report["steps"]:
        assert "error" not in row, row
        assert row["ms measured"] > 0
        assert row["peak GB measured/predicted"] == pytest.approx(1, abs=0.1), row
    assert "| peak GB measured |" in recording.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.limit_time", lambda: None)
    assert main(["gpu_report"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("got no GPU that torch sees; expected one") and error.count("\n") == 1


def test_unknown_gpus_need_a_name() -> None:
    assert known_gpu("NVIDIA H100 80GB HBM3") == "H100"
    with pytest.raises(
        ValueError, match=r"got 'NVIDIA A10', whose speeds are unknown; .* by --gpu"
    ):
        known_gpu("NVIDIA A10")
