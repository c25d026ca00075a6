"""The demo's checks pass what was learnt and fail what was not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from check_demo import (
    LinearPredictor,
    background_of,
    border_colour,
    check_against_linear,
    check_backgrounds,
    check_how_it_ran,
    check_loss_fell,
    distinct_captions,
    main,
    swap,
)
from runs import ROOT, run

from opensora_sp.data import Manifest, is_held_out, toy_clip
from opensora_sp.data.toy import COLOURS
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.encoders import PatchPoolVAE
from opensora_sp.randomness import normal

FLOW = RectifiedFlow()


@pytest.fixture(scope="module")
def latents() -> tuple[torch.Tensor, torch.Tensor]:
    vae = PatchPoolVAE((2, 4, 4))

    def encode(seed: int, count: int) -> torch.Tensor:
        frames = np.stack([toy_clip(seed, i).draw(4, 32) for i in range(count)])
        return vae.encode(torch.from_numpy(frames).permute(0, 4, 1, 2, 3).float() / 127.5 - 1)

    return encode(0, 120), encode(1, 24)


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
        is_held_out(prompt) for prompt in [*prompts, *distinct_captions(8)]
    )


def test_colours() -> None:
    captions = distinct_captions(8)
    assert all(
        background_of(a) != background_of(b) for a, b in zip(captions, swap(captions), strict=True)
    )

    colours = np.array([COLOURS[background_of(caption)] for caption in captions], dtype=float)
    wanted = [background_of(caption) for caption in captions]
    assert check_backgrounds("", colours + 10, wanted).ok
    assert not check_backgrounds(
        "", colours, [background_of(caption) for caption in swap(captions)]
    ).ok
    assert not check_backgrounds("", np.full((8, 3), 127.0), wanted).ok

    for i in range(3):
        colours[i] = COLOURS["red" if wanted[i] != "red" else "white"]
    assert not check_backgrounds("", colours, wanted).ok  # three of eight wrong

    clip = toy_clip(0, 0)
    assert np.allclose(border_colour(clip.draw(4, 40)), COLOURS[clip.background], atol=3)


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
