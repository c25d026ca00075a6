"""Models of the package: found by name in every folder, and as good as their cards say."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_demo import captioned_clips
from toy_judge import Seen, judge

from opensora_sp.cli import main
from opensora_sp.cli import sample as sample_command
from opensora_sp.common.files import shipped_model, shipped_models
from opensora_sp.data.video import read_frames


def test_the_name_of_a_model_samples_what_its_prompts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clips = captioned_clips(8, held_out=True)
    prompts = [word for clip in clips for word in ("--prompt", clip.caption)]
    main(["sample", "toy", *prompts, "--num-sampling-steps", "15"])

    videos = sorted(Path("samples").glob("*.mp4"))
    seen = [judge(read_frames(video)) for video in videos]
    right = [video == Seen.of(clip) for video, clip in zip(seen, clips, strict=True)]
    # Another processor rounds in another order, by which a sample may come out otherwise.
    assert sum(right) >= 6, seen


def test_names_of_models_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (folder,) = shipped_models()
    assert shipped_model("toy") == folder and folder.name == "toy"
    for path in ("configs/demo/sample.py", "sample.py", "a/b"):
        assert shipped_model(path) is None

    cfg = sample_command.parse(["toy", "--prompt", "a", "--ckpt", "runs", "--fps", "4"])
    assert (cfg.ckpt, cfg.fps, cfg.outputs) == ("runs", 4, "samples")
    with pytest.raises(ValueError, match="got 'tyo', .*; expected .* one of toy; did you mean"):
        sample_command.parse(["tyo", "--prompt", "a"])
    (tmp_path / "runs" / "first").mkdir()
    (tmp_path / "runs" / "first" / "sample.py").touch()
    for name, config in {"runs": "a .py config", "runs/first": "runs/first/sample.py"}.items():
        with pytest.raises(ValueError, match=rf"'{name}', .* expected {config} .* one of toy"):
            sample_command.parse([name, "--prompt", "a"])


def test_a_model_is_small_and_has_a_card() -> None:
    for folder in shipped_models():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert card.count("\n") <= 40
        parts = ("license: apache-2.0", "seed", "make toy", "of 41 held-out")
        assert all(part in card for part in parts)
