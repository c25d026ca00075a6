"""The demo's checks pass what was learnt and fail what was not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from check_demo import (
    check_attributes,
    check_decoded,
    held_out_clips,
    main,
)
from runs import ROOT, run
from toy_judge import Seen, judge

from opensora_sp.config import load_inference_config
from opensora_sp.data import Manifest, scale, to_frames
from opensora_sp.data.toy import COLOURS, is_held_out, toy_captions
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.encoders import PatchDCTVAE

FLOW = RectifiedFlow()
CLIPS = held_out_clips(16)


def test_more_held_out_clips_than_captions_are_refused() -> None:
    most = sum(map(is_held_out, toy_captions()))
    captions = {clip.caption for clip in held_out_clips(most)}
    assert len(captions) == most > 16 and captions < set(toy_captions())
    with pytest.raises(ValueError, match=f"got {most + 1} held-out .*; expected at most {most},"):
        held_out_clips(most + 1)


@pytest.mark.slow
def test_the_demo_asks_for_captions_that_training_leaves_out(tmp_path: Path) -> None:
    for more, held_out in [((), False), (("--all-captions",), True)]:
        done = run(
            "scripts/make_toy_clips.py",
            tmp_path,
            "--num",
            "40",
            "--size",
            "16",
            "--num-frames",
            "2",
            *more,
        )

        assert done.returncode == 0, done.stderr
        rows = Manifest(tmp_path / "clips.csv")
        assert len(rows) == 40 and all(row.path.is_file() for row in rows)
        assert any(is_held_out(row.text) for row in rows) == held_out

    prompts = re.findall(r'--prompt "(.+?)"', (ROOT / "Makefile").read_text())
    assert len(prompts) == 3 and all(
        is_held_out(caption) for caption in [*prompts, *(clip.caption for clip in CLIPS)]
    )


@pytest.fixture(scope="module")
def decoded() -> list[np.ndarray]:
    """The checked clips, drawn, encoded and decoded as in the demo."""
    vae = PatchDCTVAE()
    clips = [torch.from_numpy(clip.draw(8, 64)).permute(3, 0, 1, 2) for clip in CLIPS]
    return [to_frames(vae.decode(vae.encode(scale(c[None])), num_frames=8)[0]) for c in clips]


def passed(videos: list[np.ndarray]) -> dict[str, bool]:
    checks = check_attributes("", [judge(frames) for frames in videos], CLIPS)
    return {check.name.removeprefix(": "): check.ok for check in checks}


def test_decoded_clips_show_what_they_say(decoded: list[np.ndarray]) -> None:
    assert [judge(frames) for frames in decoded] == [Seen.of(clip) for clip in CLIPS]
    cfg = load_inference_config(str(ROOT / "configs/demo/sample.py"))
    assert check_decoded(PatchDCTVAE(), CLIPS, cfg).ok
    # Of the mean of 16 x 16 pixels, shapes look alike.
    assert not check_decoded(PatchDCTVAE(coefficients=1), CLIPS, cfg).ok


def test_wrong_videos_fail(decoded: list[np.ndarray]) -> None:
    every = dict.fromkeys(("background", "colour", "shape", "direction"), True)
    assert passed(decoded) == every

    assert not any(passed([*decoded[5:], *decoded[:5]]).values())
    frozen = [np.repeat(frames[:1], 8, axis=0) for frames in decoded]
    assert passed(frozen) == {**every, "direction": False}
    assert passed([frames[::-1] for frames in decoded]) == {**every, "direction": False}

    def blurred(frames: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
        mean = F.avg_pool2d(pixels, 17, stride=1, padding=8, count_include_pad=False)
        return mean.permute(0, 2, 3, 1).byte().numpy()

    assert not passed([blurred(frames) for frames in decoded])["shape"]

    plain = [np.full_like(frames, COLOURS[clip.background]) for frames, clip in zip(decoded, CLIPS)]
    assert passed(plain) == {**dict.fromkeys(every, False), "background": True}
    noise = np.random.default_rng(0).integers(0, 256, (16, 8, 64, 64, 3), dtype=np.uint8)
    assert not any(passed(list(noise)).values())


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
