"""Beginnings of captions that are removed, as by Open-Sora 1.3."""

from __future__ import annotations

import json
from pathlib import Path

from golden_values import GOLDEN
from runs import write_training

from opensora_sp.config import load_train_config
from opensora_sp.data.manifest import without_prefix
from opensora_sp.evaluation.heldout import heldout_clips
from opensora_sp.features.build import make_dataset


def test_beginnings_are_removed_as_by_the_release() -> None:
    table = json.loads((GOLDEN / "v13" / "prompts.json").read_text())["caption_prefix"]
    assert len(table["rows"]) > 4
    for caption, wanted in table["rows"]:
        assert without_prefix(caption) == wanted
    # Where nothing would be left, the release fails.
    assert without_prefix("The video is  ") == "The video is  "


def test_training_and_held_out_clips_are_without_them(tmp_path: Path) -> None:
    config, path = write_training(tmp_path, 4), tmp_path / "captioned.csv"
    path.write_text("path,text\n0.mp4,The video shows a red car\n")
    validation = f"validation={{'every': 1, 'manifest': '{path}'}}"
    options = [f"dataset.manifest={path}", validation, "dataset.remove_caption_prefix=True"]
    cfg = load_train_config(config, options)
    dataset, heldout = make_dataset(cfg), heldout_clips(cfg)
    assert heldout is not None and heldout.rows.texts == dataset.rows.texts == ["A red car"]

    # What is trained on is compared between ranks and with the checkpoint.
    plain = make_dataset(load_train_config(config, options[:1]))
    assert plain.fingerprint["text"] != dataset.fingerprint["text"]
