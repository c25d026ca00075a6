"""What hangs ends with the stacks of all threads: tests by pyproject.toml, benchmarks by theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

HANGS = """
import ctypes, threading, time

def test_waits():
    threading.Thread(target=time.sleep, args=(60,), name="another one", daemon=True).start()
    time.sleep(60)

def test_holds_the_gil():
    ctypes.PyDLL(None).sleep(60)
"""
BENCHMARKS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "time_limit.py"
)


def run_python(*command: str | Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("test_waits", ["Stack of another one", "in test_waits"]),
        ("test_holds_the_gil", ["in test_holds_the_gil"]),
    ],
)
def test_a_test_that_hangs_ends_the_session(tmp_path: Path, name: str, stacks: list[str]) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    short = ["-o", "timeout=3", "-o", "faulthandler_timeout=8", "-p", "no:cacheprovider"]
    where = [
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
        f"{tmp_path / 'test_hangs.py'}::{name}",
    ]
    done = run_python("-m", "pytest", "-q", *short, *where)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "Timeout" in text, text
    assert all(stack in text for stack in stacks), text


@pytest.mark.slow
def test_a_benchmark_that_hangs_ends() -> None:
    done = run_python("-m", "benchmarks", "one_process", BENCHMARK_TIME_LIMIT="0.01")
    assert done.returncode == 1 and "Timeout" in done.stderr and "in main" in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_all_processes_of_benchmarks_have_a_limit(name: str) -> None:
    text = (ROOT / "benchmarks" / name).read_text()
    # __main__.py limits the process that runs it, and each benchmark those that it starts.
    expected = text.count("dist.init_process_group(") + (name == "__main__.py")
    assert text.count("    limit_time()\n") == expected
