"""The demo's checks pass what was learnt and fail what was not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from check_demo import (
    LinearPredictor,
    check_against_linear,
    check_attributes,
    check_decoded,
    check_how_it_ran,
    check_loss_fell,
    held_out_clips,
    main,
    write_animation,
)
from PIL import Image
from runs import ROOT, run
from toy_judge import Seen, judge

from opensora_sp.config import load_inference_config
from opensora_sp.data import Manifest, scale, to_frames, toy_clip
from opensora_sp.data.randomness import normal
from opensora_sp.data.toy import COLOURS, is_held_out, toy_captions
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.encoders import PatchDCTVAE

FLOW = RectifiedFlow()
CLIPS = held_out_clips(16)


@pytest.fixture(scope="module")
def latents() -> tuple[torch.Tensor, torch.Tensor]:
    vae = PatchDCTVAE((2, 8, 8))

    def encode(seed: int, count: int) -> torch.Tensor:
        frames = np.stack([toy_clip(seed, i).draw(4, 32) for i in range(count)])
        return vae.encode(torch.from_numpy(frames).permute(0, 4, 1, 2, 3).float() / 127.5 - 1)

    return encode(0, 120), encode(1, 24)


def test_more_held_out_clips_than_captions_are_refused() -> None:
    most = sum(map(is_held_out, toy_captions()))
    captions = {clip.caption for clip in held_out_clips(most)}
    assert len(captions) == most > 16 and captions < set(toy_captions())
    with pytest.raises(ValueError, match=f"got {most + 1} held-out .*; expected at most {most},"):
        held_out_clips(most + 1)


def test_a_predictor_that_knows_the_clips_passes_and_a_linear_one_fails(latents: tuple) -> None:
    train, held = latents
    noise = torch.stack([normal(tuple(held.shape[1:]), 0, "held out", i) for i in range(len(held))])

    def almost_right(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (
            held - noise + 0.1 * torch.randn(held.shape, generator=torch.Generator().manual_seed(0))
        )

    def linear(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return LinearPredictor(train)(x_t, t / 1000, 1e-3)

    def nothing(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x_t)

    assert all(finding.ok for finding in check_against_linear(FLOW, almost_right, train, held))
    assert not any(finding.ok for finding in check_against_linear(FLOW, linear, train, held))
    assert not any(finding.ok for finding in check_against_linear(FLOW, nothing, train, held))


def test_the_linear_predictor_is_the_least_squares_one() -> None:
    """On Gaussian data its error is that of the closed form; no other linear map does better."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([2.0, 1.0, 0.5, 0.1])
    data = torch.randn(20_000, 4, generator=generator) * scales + 1
    noise = torch.randn(data.shape, generator=generator)
    share = torch.full((len(data),), 0.3)
    x_t = 0.7 * data + 0.3 * noise
    target = data - noise
    ours = (LinearPredictor(data)(x_t, share, 0.0) - target).square().mean()
    design = torch.cat([x_t, torch.ones(len(x_t), 1)], dim=1)
    best = (design @ torch.linalg.lstsq(design, target).solution - target).square().mean()
    closed_form = (scales**2 / (0.49 * scales**2 + 0.09)).mean()
    assert ours == pytest.approx(best.item(), rel=0.01) and ours == pytest.approx(
        closed_form.item(), rel=0.03
    )


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


def test_one_video_too_few_fails(decoded: list[np.ndarray]) -> None:
    """Shapes may be wrong in 6 of 16, the other attributes in 4."""
    seen = [judge(frames) for frames in decoded]
    others = {"background": "black", "colour": "black", "shape": "star", "direction": "in"}
    for wrong in range(3, 8):
        changed = [replace(video, **others) for video in seen[:wrong]] + seen[wrong:]
        checks = check_attributes("", changed, CLIPS)
        assert [check.ok for check in checks] == [wrong <= 4, wrong <= 4, wrong <= 6, wrong <= 4]


def test_animation(tmp_path: Path, decoded: list[np.ndarray]) -> None:
    shown = [(clip.caption, frames) for clip, frames in zip(CLIPS, decoded, strict=True)]
    write_animation(tmp_path / "a.gif", shown, fps=8)
    assert (tmp_path / "a.gif").stat().st_size < 1e6
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 4  # equal neighbours become one
        assert image.info["duration"] == 250 and image.info["loop"] == 0


def test_loss_and_how_it_ran() -> None:
    assert (
        check_loss_fell(np.linspace(1, 0.3, 100)).ok
        and not check_loss_fell(np.linspace(1, 0.7, 100)).ok
    )
    good = {"sp_size": 2, "switches": 5, "files_read": {".mp4": 3}}
    assert check_how_it_ran(good).ok
    for change in ({"sp_size": 1}, {"switches": 0}, {"files_read": {".npy": 3}}):
        assert not check_how_it_ran({**good, **change}).ok


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
