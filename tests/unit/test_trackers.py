"""What TensorBoard and W&B get of a run: with the real packages, and without them."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import types
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logs import captured_lines
from PIL import Image

from opensora_sp.common.importing import check_extra
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.video import write_video
from opensora_sp.encoders.t5 import check_cleaning
from opensora_sp.training import metrics
from opensora_sp.training.metrics import Reporter
from opensora_sp.training.trackers import check_trackers

VALUES: dict[str, float | None] = {"loss": 0.5, "lr": 1e-4, "tokens_per_s": 7.0, "eta": 1.0}
VALUES |= {"step_time": 1.0, "peak_memory_gb": 1.0, "data_wait": 0.1, "communication": 0.1}
VALUES |= {"grad_norm": 1.0, "skipped_steps": 2}
CONFIG = {"optimizer": {"lr": 0.002, "betas": [0.9, 0.99]}, "seed": 3, "load": None, "ema": True}
VIDEO, IMAGE = "validation/000-a-fox", "validation/001-a-lake"


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged; nothing is drawn."""
    monkeypatch.setattr(metrics, "draw_loss", lambda folder: None)
    handlers = logging.getLogger("opensora_sp").handlers[:]
    yield captured_lines()
    logging.getLogger("opensora_sp").handlers[:] = handlers


def config_of(**options: Any) -> Any:
    options = {"tensorboard": True, "wandb": False} | options
    return types.SimpleNamespace(max_steps=4, model_dump=lambda mode: CONFIG, **options)


def reporter_of(run_dir: Path, start: int = 0, **options: Any) -> Reporter:
    session = {"device": "CPU", "sp_size": 2}
    return Reporter(run_dir, config_of(**options), enabled=True, start=start, session=session)


def write_validation(folder: Path) -> Path:
    """A video and an image as validation leaves them."""
    folder.mkdir(parents=True)
    write_video(folder / "000-a-fox.mp4", toy_clip(0, 1).draw(5, 32), fps=8)
    Image.fromarray(np.zeros((24, 32, 3), np.uint8)).save(folder / "001-a-lake.png")
    for name, kind in (("000-a-fox", "mp4"), ("001-a-lake", "png")):
        (folder / f"{name}.json").write_text(json.dumps({"format": kind, "fps": 8.0}))
    return folder


def report_a_run(run_dir: Path, **options: Any) -> None:
    """Two steps, validation, and two more steps after a resume."""
    folder = write_validation(run_dir / "validation" / "step_00000002")
    reporter = reporter_of(run_dir, **options)
    for step in (1, 2):
        reporter.log(step, VALUES | {"loss": 1 / step})
        reporter.step(step)
    reporter.validated(2, [0.25, 0.75], folder)
    reporter.close()

    # W&B names a session's folder by its second.
    time.sleep(1.0 if options.get("wandb") else 0.0)
    reporter = reporter_of(run_dir, start=2, **options)
    for step in (3, 4):
        reporter.log(step, VALUES)
    reporter.close()


def test_tensorboard_shows_hyperparameters_and_metrics(tmp_path: Path, log: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    report_a_run(run_dir)

    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    names = {*VALUES, "validation/loss"}
    names |= {f"validation/loss of bin {number} of 2" for number in (1, 2)}
    assert set(board.Tags()["scalars"]) == names
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in board.Scalars("validation/loss")] == [0.5]

    (shown, _) = board.Tensors("config/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert json.loads(text) == CONFIG | {"session": {"device": "CPU", "sp_size": 2}}


def wandb_records(run_dir: Path) -> list[tuple[str, Any]]:
    """The records of all offline runs in a folder, by the order of their starts."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        for data in iter(store.scan_data, None):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            found.append((kind, getattr(record, kind)))
    return found


def values_of(items: Any) -> dict[str, Any]:
    """A record's items, those of W&B itself left out."""
    values = {"/".join(item.nested_key) or item.key: item.value_json for item in items}
    return {key: json.loads(one) for key, one in values.items() if not key.startswith("_")}


@pytest.mark.slow
def test_wandb_gets_hyperparameters_metrics_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline."""
    for name, value in (("MODE", "offline"), ("ERROR_REPORTING", "false"), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    run_dir = tmp_path / "run"
    report_a_run(run_dir, wandb=True, tensorboard=False)
    assert not (run_dir / "tensorboard").exists()

    by_kind: dict[str, list[Any]] = {}
    for kind, record in wandb_records(run_dir):
        by_kind.setdefault(kind, []).append(record)
    configs = [values_of(one.config.update) for one in by_kind["run"]]
    assert len(configs) == 2 and configs[0]["optimizer"] == CONFIG["optimizer"]
    assert configs[0]["session"]["sp_size"] == 2
    (run_id,) = {one.run_id for one in by_kind["run"]}
    assert run_id == (run_dir / "wandb_id").read_text()

    history = [values_of(one.item) for one in by_kind["history"]]
    assert [one["loss"] for one in history if "loss" in one] == [1.0, 0.5, 0.5, 0.5]
    heldout = [one for one in history if "validation/loss" in one]
    assert [(one["step"], one["validation/loss"]) for one in heldout] == [(2, 0.5)]

    merged = dict(chain.from_iterable(one.items() for one in history))
    assert f"{IMAGE}/path" in merged
    (video,) = run_dir.glob(f"wandb/*/files/{merged[f'{VIDEO}/path']}")
    original = run_dir / "validation" / "step_00000002" / "000-a-fox.mp4"
    assert video.read_bytes() == original.read_bytes()


def test_what_is_not_installed_is_refused_with_its_extra(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboard", "wandb", "ftfy"):
        monkeypatch.setitem(sys.modules, module, None)

    def refusal(name: str) -> str:
        return rf", and no package {name}; expected the extra '\w+' to be installed; pip install"

    with pytest.raises(ValueError, match="got wandb=True" + refusal("wandb")):
        check_trackers(config_of(wandb=True, tensorboard=False))
    with pytest.raises(ValueError, match="got tensorboard=True" + refusal("tensorboard")):
        check_trackers(config_of())
    cleaning = re.escape("got text_encoder.clean_captions=True") + refusal("ftfy")
    with pytest.raises(ValueError, match=cleaning + r" 'opensora-sp\[captions\]'"):
        check_cleaning()

    # A folder is no package.
    (tmp_path / "no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="and no package no_package"):
        check_extra("x", "no_package", setting="", instead="")

    # By default, a run goes without.
    check_trackers(config_of(tensorboard="auto"))
    reporter_of(tmp_path, tensorboard="auto").close()
    assert not (tmp_path / "tensorboard").exists()
