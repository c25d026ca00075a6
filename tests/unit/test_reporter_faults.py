"""Metrics that cannot be written are logged once, and end no run; what is written is whole."""

from __future__ import annotations

import logging
import resource
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import captured_lines

from opensora_sp.data.limits import Limits
from opensora_sp.training import metrics
from opensora_sp.training.metrics import (
    Reporter,
    append_line,
    draw_loss,
    read_lines,
    read_metrics,
    read_validations,
)

VALUES: dict[str, float | None] = {"loss": 0.5, "lr": 1e-4, "tokens_per_s": 7.0, "eta": 1.0}
VALUES |= {"step_time": 1.0, "peak_memory_gb": 1.0, "data_wait": 0.1, "communication": 0.1}
VALUES |= {"grad_norm": 1.0}


class Broken:
    """In the place of the package wandb: its server does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("no route to host")


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged. Runs write ``loss.png``, but draw nothing, which takes long."""
    monkeypatch.setattr(metrics, "draw_loss", lambda folder: (folder / "loss.png").write_text("-"))
    handlers = logging.getLogger("opensora_sp").handlers[:]
    yield captured_lines()
    logging.getLogger("opensora_sp").handlers[:] = handlers


def report(run_dir: Path, steps: range, wandb: bool = False) -> None:
    """A run from one step to another, which logs and validates each."""
    cfg: Any = types.SimpleNamespace(
        max_steps=steps.stop,
        wandb=wandb,
        tensorboard="auto",
        limits=Limits(),
        model_dump=lambda mode: {"max_steps": steps.stop},
    )
    reporter = Reporter(run_dir, cfg, enabled=True, start=steps.start, session={"device": "CPU"})
    for step in steps:
        reporter.log(step + 1, VALUES)
        reporter.validated(step + 1, [0.25], run_dir / "validation")
    reporter.close()
    assert reporter.last == VALUES


def full_disk(path: Path) -> None:
    path.symlink_to("/dev/full")


FAULTS = {
    "metrics.jsonl": (full_disk, "OSError: [Errno 28] No space left on device"),
    "validation.jsonl": (full_disk, "OSError: [Errno 28] No space left on device"),
    "sessions.jsonl": (full_disk, "OSError: [Errno 28] No space left on device"),
    "tensorboard": (Path.touch, "FileExistsError: [Errno 17] File exists"),
    "loss.png": (Path.mkdir, "IsADirectoryError: [Errno 21] Is a directory"),
}


@pytest.mark.parametrize("output", FAULTS)
def test_an_output_that_cannot_be_written_ends_nothing_else(
    output: str, log: list[str], tmp_path: Path
) -> None:
    plant, reason = FAULTS[output]
    plant(tmp_path / output)
    report(tmp_path, range(3))

    name = {"tensorboard": "TensorBoard"}.get(output, output)
    warnings = [line for line in log if "incomplete" in line]
    assert len(warnings) == 1 and warnings[0].startswith(f"{name} is incomplete from here on (")
    assert reason in warnings[0] and warnings[0].endswith("; the run continues")
    assert sum(line.startswith("step ") for line in log) == 6

    for other in {"metrics.jsonl", "validation.jsonl", "sessions.jsonl"} - {output}:
        assert len(read_lines(tmp_path / other)) == (1 if other == "sessions.jsonl" else 3)

    # The next start, after the fault was mended.
    (tmp_path / output).rmdir() if output == "loss.png" else (tmp_path / output).unlink()
    log.clear()
    report(tmp_path, range(3, 5))
    assert not [line for line in log if "incomplete" in line]
    assert [line["step"] for line in read_metrics(tmp_path)][-2:] == [4, 5]
    assert (tmp_path / "loss.png").stat().st_size and list((tmp_path / "tensorboard").iterdir())


def test_curves_that_fail_while_the_run_trains(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(self: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", write)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setitem(sys.modules, "wandb", Broken())
    report(tmp_path, range(3), wandb=True)

    warnings = [line for line in log if "incomplete" in line]
    assert len(warnings) == 2 and "TensorBoard" in "".join(warnings)
    assert any(line.startswith("W&B is incomplete") and "no route" in line for line in warnings)
    assert len(read_metrics(tmp_path)) == 3


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_line(path, {"step": 1})
    before = path.read_bytes()
    for room in (0, 1, len(before) - 1):
        # A file takes only so many bytes, as on a disk that becomes full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
        with pytest.raises(OSError):
            append_line(path, {"step": 2})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before


def test_a_line_that_was_cut_off_does_not_stop_the_next_start(tmp_path: Path) -> None:
    report(tmp_path, range(2))
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 2, "lo')

    report(tmp_path, range(1, 3))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert [line["step"] for line in read_lines(tmp_path / "sessions.jsonl")] == [0, 1]

    text = (tmp_path / "metrics.jsonl").read_text().replace("}\n", '}\n{"step\n', 1)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("place", "bit"), [(b'{"step', 1), (b'step": ', 1), (b"loss", 0x80), (b"skipped", 1)]
)
def test_a_flipped_bit_costs_one_line(
    place: bytes, bit: int, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VALUES, "skipped_steps", 2)
    report(tmp_path, range(3))

    content = bytearray((tmp_path / "metrics.jsonl").read_bytes())
    content[content.rindex(place)] ^= bit
    (tmp_path / "metrics.jsonl").write_bytes(content)
    report(tmp_path, range(3, 5))
    assert not [line for line in log if "incomplete" in line]
    kept = [3] if place == b"skipped" else []
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, *kept, 4, 5]


def test_a_flipped_bit_costs_one_validation(tmp_path: Path) -> None:
    report(tmp_path, range(3))
    path = tmp_path / "validation.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first.replace(b'"loss"', b'"lors"') + b"".join(others))

    draw_loss(tmp_path)
    assert len(read_validations(tmp_path)) == len(others) > 0


def test_metrics_stay_where_they_cannot_be_rewritten(tmp_path: Path) -> None:
    report(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / ".partial-metrics.jsonl").symlink_to("/dev/full")
    report(tmp_path, range(3, 4))
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
