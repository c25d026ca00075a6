"""Captions in training as Open-Sora 1.3 words them: scores in words, no beginnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_values import GOLDEN
from runs import write_training

from opensora_sp.config import load_train_config
from opensora_sp.data import Manifest
from opensora_sp.data.captions import Captions, without_prefix
from opensora_sp.evaluation.heldout import heldout_clips
from opensora_sp.features.build import make_dataset

HEADER = "path,text,aes,flow,cmotion\n"
LINES = [
    "0.mp4,The video shows a red car,6.2,7,pan_right",
    "1.mp4,A cat.,3.9,0,dynamic",
    "2.mp4,Rain. motion strength is high.,,30,static",
    "3.mp4,,5,,",
    "4.mp4,A dog.  ,5,,",
]
WORDED = [
    "A red car. The aesthetic score is very good. The motion strength is high. "
    "camera motion: pan right.",
    "A cat. The aesthetic score is terrible. The motion strength is very low.",
    "Rain. motion strength is high. camera motion: static.",
    "The aesthetic score is fair.",
    "A dog. The aesthetic score is fair.",
]


def write(folder: Path, lines: list[str], header: str = HEADER) -> Path:
    (folder / "scored.csv").write_text(header + "\n".join(lines) + "\n")
    return folder / "scored.csv"


def test_beginnings_are_removed_as_by_the_release() -> None:
    table = json.loads((GOLDEN / "v13" / "prompts.json").read_text())["caption_prefix"]
    assert len(table["rows"]) > 4
    for caption, wanted in table["rows"]:
        assert without_prefix(caption) == wanted
    # Where nothing would be left, the release fails.
    assert without_prefix("The video is  ") == "The video is  "


def test_captions_end_with_the_scores_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opensora_sp.data.captions.DROP", 0.0)
    path = write(tmp_path, LINES)
    both = Captions(with_scores=True, without_prefix=True)
    assert Manifest(path, captions=both).texts == WORDED
    assert Manifest(path).texts[0] == "The video shows a red car"
    assert Manifest(path, captions=Captions(without_prefix=True)).texts[0] == "A red car"
    # Any of the columns will do.
    alone = write(tmp_path, ["0.mp4,a red car,20"], "path,text,flow\n")
    (text,) = Manifest(alone, captions=both).texts
    assert text == "a red car. The motion strength is extremely high."


def test_a_fifth_of_the_scores_is_left_out_once_and_for_all(tmp_path: Path) -> None:
    lines = [f"{i}.mp4,a cat,6,5,static" for i in range(2000)]
    words = Captions(with_scores=True)
    texts = Manifest(write(tmp_path, lines), captions=words).texts
    for phrase in ("aesthetic score is very good.", "motion strength is high."):
        assert sum(phrase not in text for text in texts) / 2000 == pytest.approx(0.2, abs=0.03)
    assert all(text.endswith("camera motion: static.") for text in texts)
    neither = [text for text in texts if text == "a cat. camera motion: static."]
    assert len(neither) / 2000 == pytest.approx(0.04, abs=0.015)

    # The draws of a line do not depend on those after it.
    assert Manifest(write(tmp_path, lines[:50]), captions=words).texts == texts[:50]


def test_training_and_held_out_clips_have_them(tmp_path: Path) -> None:
    config, path = write_training(tmp_path, 4), write(tmp_path, LINES)
    options = [
        f"dataset.manifest={path}",
        "dataset.caption_scores=words",
        "dataset.remove_caption_prefix=True",
        f"validation={{'every': 1, 'manifest': '{path}'}}",
    ]
    cfg = load_train_config(config, options)
    dataset, heldout = make_dataset(cfg), heldout_clips(cfg)
    expected = Captions(True, True)
    assert dataset.rows.texts == Manifest(path, captions=expected).texts
    assert heldout is not None and heldout.rows.texts == dataset.rows.texts
    assert dataset.rows[0].text.startswith("A red car. ")
    # They are the same with any seed, and beside a feature cache.
    cached = "dataset={'_delete_': True, 'type': 'CachedFeatures', 'path': 'x', " + (
        "'caption_scores': 'words', 'remove_caption_prefix': True}"
    )
    other = heldout_clips(load_train_config(config, ["seed=7", cached, options[-1]]))
    assert other is not None and other.rows.texts == dataset.rows.texts

    # What is trained on is compared between ranks and with the checkpoint.
    plain = make_dataset(load_train_config(config, options[:1]))
    assert plain.fingerprint["text"] != dataset.fingerprint["text"]


BAD_LINES = {
    "0.mp4,a cat,6,5,sideways": r"got cmotion 'sideways' for clip 1 of .*; expected one of \['sta",
    "0.mp4,a cat,great,5,": "got aes 'great' for clip 1 of .*; expected a number",
    "0.mp4,a cat,6,-1,": "got flow '-1' for clip 1 of .*; expected a number >= 0 or nothing",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_scores_that_are_none_are_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=BAD_LINES[line]):
        Manifest(write(tmp_path, [line]), captions=Captions(with_scores=True))


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = write_training(tmp_path, 4)
    for option, message in {
        "dataset.caption_scores=numbers": "expected 'words'; change dataset.caption_scores",
        "dataset.caption_score=words": "did you mean 'caption_scores'?",
        "dataset.remove_caption_prefix=3": "got dataset.remove_caption_prefix = 3",
    }.items():
        with pytest.raises(ValueError) as error:
            load_train_config(config, [option])
        assert message in str(error.value)

    cfg = load_train_config(config, ["dataset.caption_scores=words"])
    with pytest.raises(
        ValueError, match="expected at least one of aes, flow, cmotion; add one to this"
    ):
        make_dataset(cfg)
