"""The demo's checks pass what was learnt and fail what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from check_demo import captioned_clips, main
from runs import ROOT, run

from opensora_sp.data.manifest import Manifest
from opensora_sp.data.toy import is_held_out, toy_captions

CLIPS = captioned_clips(16, held_out=True)


def test_more_held_out_clips_than_captions_are_refused() -> None:
    most = sum(map(is_held_out, toy_captions()))
    captions = {clip.caption for clip in captioned_clips(most, held_out=True)}
    assert len(captions) == most > 16 and captions < set(toy_captions())
    with pytest.raises(ValueError, match=f"got {most + 1} clips .*; expected at most {most},"):
        captioned_clips(most + 1, held_out=True)


@pytest.mark.slow
def test_the_demo_asks_for_captions_that_training_leaves_out(tmp_path: Path) -> None:
    for more, held_out in [((), False), (("--all-captions",), True)]:
        small = ("--num", "40", "--size", "16", "--num-frames", "2")
        done = run("scripts/make_toy_clips.py", tmp_path, *small, *more)
        assert done.returncode == 0, done.stderr
        rows = Manifest(tmp_path / "clips.csv")
        assert len(rows) == 40 and all(row.path.is_file() for row in rows)
        assert any(is_held_out(row.text) for row in rows) == held_out

    prompts = re.findall(r'--prompt "(.+?)"', (ROOT / "Makefile").read_text())
    assert len(prompts) == 3 and all(
        is_held_out(caption) for caption in [*prompts, *(clip.caption for clip in CLIPS)]
    )


def test_the_runs_own_config_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["check_demo.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "which holds no weights" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
