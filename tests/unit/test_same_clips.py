"""Which changes of a manifest are noticed, and what a run that resumes with other clips does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from runs import TRAIN

from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.data.manifest import Entry, Manifest, write_manifest
from opensora_sp.features.build import make_dataset, make_plan, order_state
from opensora_sp.training.preflight import check_resume, preflight

ENTRIES = [Entry(Path(f"{i}.mp4"), f"clip {i}", 9 + i, 64, 48) for i in range(6)]


def changed(kind: str) -> list[Entry]:
    entries = list(ENTRIES)
    if kind == "order":
        entries[1], entries[4] = entries[4], entries[1]
    elif kind == "length":
        entries.append(Entry(Path("6.mp4"), "clip 6", 15, 64, 48))
    elif kind == "captions":
        entries[1] = entries[1]._replace(text=entries[4].text)
        entries[4] = entries[4]._replace(text=ENTRIES[1].text)
    elif kind == "sizes":
        entries[2] = entries[2]._replace(width=50)
    return entries


def fingerprint(path: Path, entries: list[Entry]) -> dict[str, str]:
    write_manifest(path, entries)
    return Manifest(path).fingerprint


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("order", {"path", "text", "num_frames"}),
        ("length", {"path", "text", "num_frames", "height", "width"}),
        ("captions", {"text"}),
        ("sizes", {"width"}),
    ],
)
def test_a_fingerprint_has_the_columns_that_differ(
    tmp_path: Path, kind: str, columns: set[str]
) -> None:
    own = fingerprint(tmp_path / "a.csv", ENTRIES)
    other = fingerprint(tmp_path / "b.csv", changed(kind))
    assert {name for name in own if own[name] != other[name]} == columns
    assert own["text"].startswith("6 of 6 cells, digest ")


def test_a_fingerprint_is_of_the_content_and_not_of_the_file(tmp_path: Path) -> None:
    entries = [*ENTRIES, Entry(Path("6.mp4"), "")]
    found = fingerprint(tmp_path / "a.jsonl", entries)
    assert found["text"].startswith("6 of 7 cells") and found["width"].startswith("6 of 7 cells")
    assert fingerprint(tmp_path / "a.csv", entries) == found
    assert fingerprint(tmp_path / "a.parquet", entries) == found

    # A column of numbers that is empty, or informational, changes nothing.
    (tmp_path / "short.csv").write_text("path,text\na.mp4,x\n")
    (tmp_path / "long.csv").write_text("path,text,num_frames,fps\na.mp4,x,,25\n")
    short, long = (Manifest(tmp_path / name).fingerprint for name in ("short.csv", "long.csv"))
    assert short == long

    # Where one caption ends and the next begins matters.
    pairs = [("ab", "c"), ("a", "bc"), ("a\0b", "c"), ("abc", "")]
    digests = set()
    for pair in pairs:
        rows = [Entry(Path("a.mp4"), text) for text in pair]
        digests.add(fingerprint(tmp_path / "pair.jsonl", rows)["text"])
    assert len(digests) == len(pairs)

    # JSON can hold half of a surrogate pair.
    (tmp_path / "half.jsonl").write_text(json.dumps({"path": "a.mp4", "text": "\ud800"}))
    assert Manifest(tmp_path / "half.jsonl").fingerprint["text"].startswith("1 of 1 cells")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    manifest = tmp_path / "clips.csv"
    write_manifest(manifest, ENTRIES)
    (tmp_path / "config.py").write_text(TRAIN.format(manifest=str(manifest)))
    options = ["sp_size=1", "load=None", f"outputs={tmp_path / 'run'}"]
    return load_train_config(tmp_path / "config.py", options)


@pytest.fixture
def checkpoint(config: TrainConfig) -> Path:
    """The part of a checkpoint that decides on whether a run can resume from it."""
    dataset = make_dataset(config)
    plan = make_plan(config, dataset, 2)
    state: dict[str, Any] = {
        "step": 2,
        **order_state(config, plan, len(dataset)),
        "loss_weight": config.loss_weight,
        "manifest_columns": dataset.fingerprint,
        "micro_batches_per_step": 2,
        "config": config.model_dump(mode="json"),
    }
    folder = Path(config.outputs) / "step_00000002"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("order", r"dataset\.manifest path 6 of 6 cells, .*\(there 6 of 6 cells, .*manifest text"),
        ("captions", r"got dataset\.manifest text 6 of 6 cells, digest \w+ \(there 6 of 6 cells,"),
        ("length", r"num_samples 7 \(there 6\), .*manifest text 7 of 7 cells.* \(there 6 of 6"),
        ("sizes", r"got dataset\.manifest width 6 of 6 cells"),
    ],
)
def test_resuming_with_other_clips_is_refused_unless_they_are_accepted(
    config: TrainConfig,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    named: str,
) -> None:
    check_resume(config, checkpoint, make_dataset(config))
    assert config.dataset.manifest is not None
    write_manifest(config.dataset.manifest, changed(kind))
    dataset = make_dataset(config)

    with pytest.raises(ValueError, match=f"{named}.* --accept-new-data"):
        check_resume(config, checkpoint, dataset)

    with caplog.at_level(logging.WARNING):
        check_resume(config, checkpoint, dataset, accept_new_data=True)
    assert "new data accepted: " in caplog.text and "dataset.manifest" in caplog.text
    # The seed is not data.
    other = config.model_copy(update={"seed": 5})
    with pytest.raises(ValueError, match="got seed 5"):
        check_resume(other, checkpoint, dataset, accept_new_data=True)


def test_accepting_new_data_takes_a_run_to_resume(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match="got --accept-new-data without --resume; expected"):
        preflight(config, None, accept_new_data=True)
