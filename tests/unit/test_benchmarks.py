"""The runner of the benchmarks: what it lists, runs and writes."""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest
import torch

from benchmarks.__main__ import main, summaries

NAMES = list(summaries())


@pytest.mark.parametrize("name", NAMES)
def test_all_have_a_summary_and_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"[A-Z].{30,98}\.", summaries()[name])
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("kept", "status"), [(None, 0), (True, 0), (False, 1)])
def test_figures_are_written_and_missed_limits_fail(tmp_path, monkeypatch, kept, status) -> None:
    benchmark = import_module("benchmarks.model_step")
    figures = {"sizes": [1.5]} | ({} if kept is None else {"kept": kept})
    monkeypatch.setattr(benchmark, "run", lambda args: figures | {"repeats": args.repeats})
    monkeypatch.setattr("benchmarks.__main__.limit_time", lambda: None)

    file = tmp_path / "figures.json"
    assert main(["model_step", "--repeats", "3", "--json", str(file)]) == status
    assert json.loads(file.read_text()) == figures | {"repeats": 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.limit_time", lambda: None)
    assert main(["gpu_report"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("got no GPU that torch sees; expected one") and error.count("\n") == 1
