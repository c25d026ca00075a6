"""Degraded clips of Open-Sora 1.3: what is drawn, what becomes of pixels, and what is learned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opensora_sp.data.dataset import Clip, ClipShape
from opensora_sp.data.randomness import generator
from opensora_sp.data.transforms import Degradation, scale
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.process import Noised
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.sources import DegradedClips, Encoders
from opensora_sp.training.trainer import encoders_of_validation

CPU = torch.device("cpu")
PROB = {"gaussian_pixel": 0.5, "downsample_spatial": 0.2, "downsample_temporal": 0.3}
STRENGTH: dict[str, Any] = {
    "gaussian_pixel": 0.4,
    "downsample_spatial": [2, 4, 4, 8],
    "downsample_temporal": [2, 4],
}


def test_each_kind_is_drawn_with_its_probability() -> None:
    drawn = [Degradation.draw(PROB, STRENGTH, generator(1, "a", i)) for i in range(2000)]
    spatial = [one.downsample_spatial for one in drawn]
    assert set(spatial) == {1, 2, 4, 8}
    assert 2 * spatial.count(2) == pytest.approx(spatial.count(4), rel=0.3)
    shares = [one.gaussian_pixel for one in drawn]
    assert min(shares) >= 0 and 0.39 < max(shares) < 0.4
    assert not any(one.gaussian_feature for one in drawn)
    for found, wanted in (
        (sum(one != 1 for one in spatial), PROB["downsample_spatial"]),
        (sum(one.downsample_temporal != 1 for one in drawn), PROB["downsample_temporal"]),
        (sum(one > 0 for one in shares), PROB["gaussian_pixel"]),
    ):
        assert found / len(drawn) == pytest.approx(wanted, abs=0.04)
    # A probability changes no other kind.
    others = {**PROB, "downsample_spatial": 0.0}
    again = [Degradation.draw(others, STRENGTH, generator(1, "a", i)) for i in range(20)]
    assert again == [replace(one, downsample_spatial=1) for one in drawn[:20]]


def halved_and_back(x: Tensor, dim: int) -> Tensor:
    """Linear interpolation at pixel centres: means of pairs, then 3/4 of the nearer of two."""
    x = x.movedim(dim, 0)
    small = (x[0::2] + x[1::2]) / 2
    before = torch.cat([small[:1], small[:-1]])
    after = torch.cat([small[1:], small[-1:]])
    pairs = torch.stack([(3 * small + before) / 4, (3 * small + after) / 4], dim=1)
    return pairs.flatten(0, 1).movedim(0, dim)


def test_pixels_are_resampled_and_noised() -> None:
    video = torch.rand(1, 3, 6, 8, 10, generator=torch.Generator().manual_seed(0))
    spatial = Degradation(downsample_spatial=2).of_pixels(video)
    torch.testing.assert_close(spatial, halved_and_back(halved_and_back(video, 3), 4))
    temporal = Degradation(downsample_temporal=2).of_pixels(video)
    torch.testing.assert_close(temporal, halved_and_back(video, 2))

    # A clip of three frames has no eighth: all become one.
    short = Degradation(downsample_temporal=8).of_pixels(video[:, :, :3])
    assert torch.equal(short, short[:, :, :1].expand_as(short))

    zeros = torch.zeros(1, 3, 4, 50, 50)
    noisy = [Degradation(gaussian_pixel=0.3, noise_seed=i).of_pixels(zeros) for i in (1, 1, 2)]
    assert torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[0], noisy[2])
    assert noisy[0].std().item() == pytest.approx(0.3, rel=0.02)
    ones = Degradation(gaussian_feature=0.25, noise_seed=1).of_latents(torch.ones(16, 4, 30, 30))
    assert ones.mean().item() == pytest.approx(0.75, rel=0.02)
    assert Degradation().keeps_pixels and torch.equal(Degradation().of_pixels(video), video)


def clip(number: int, epoch: int, frames: int = 5) -> Clip:
    rng = torch.Generator().manual_seed(number)
    video = torch.randint(256, (3, frames, 16, 12), generator=rng, dtype=torch.uint8)
    return Clip(video, "a caption", 8.0, key=(epoch, number))


def test_latents_of_degraded_and_of_true_clips() -> None:
    plain = Encoders(PatchPoolVAE((1, 4, 4)), HashedBagOfWords(8, 6), CPU)
    prob = {"downsample_spatial": 1.0, "downsample_temporal": 0.5, "gaussian_feature": 0.5}
    strength = {**STRENGTH, "gaussian_feature": 0.2}
    source = DegradedClips(plain, 3, prob, strength)
    (piece,) = source.pieces(ClipShape(5, 16, 12))
    assert (piece.frames, piece.latents) == (slice(0, 5), slice(0, 5)) and source.carried == 6

    items = [clip(1, 0), clip(2, 0), clip(1, 1), clip(3, 0, frames=1)]
    found = source.latents(items)
    for item, latents, true in zip(items, found, plain.latents(items), strict=True):
        assert torch.equal(latents[3:], true)
        drawn = Degradation.draw(prob, strength, generator(3, "noise_augmentation", *item.key))
        pixels = drawn.of_pixels(scale(item.video[None]))
        wanted = drawn.of_latents(plain.vae.encode(pixels)[0])
        is_image = item.video.shape[1] == 1
        torch.testing.assert_close(latents[:3], true if is_image else wanted)
        assert is_image or not torch.equal(latents[:3], true)

    # Validation measures true clips.
    cfg: Any = SimpleNamespace(validation="every step")
    assert encoders_of_validation(cfg, source, CPU) is plain

    # By seed, epoch and clip, whatever else is in the batch.
    assert torch.equal(source.latents(items[1:2])[0], found[1])
    assert not torch.equal(found[2], found[0])
    kept = DegradedClips(plain, 3, {"gaussian_pixel": 0.0}, STRENGTH).latents(items[:1])[0]
    assert torch.equal(kept[:3], kept[3:])


def test_the_target_leads_to_the_true_clip() -> None:
    rng = np.random.default_rng(0)
    degraded, true, noise = (
        torch.from_numpy(rng.standard_normal((2, 3, 4, 2, 2))) for _ in range(3)
    )
    flow, t = RectifiedFlow(), torch.tensor([250.0, 1000.0])
    noised = Noised.of(flow, degraded, noise, t, None, (), true)
    share = torch.tensor([0.75, 0.0]).view(2, 1, 1, 1, 1)
    torch.testing.assert_close(noised.x_t, share * degraded + (1 - share) * noise)
    assert torch.equal(noised.target, true - noise)
    mask = torch.tensor([[False, True, True, True]] * 2)
    masked = Noised.of(flow, degraded, noise, t, mask, (), true)
    assert torch.equal(masked.x_t[:, :, 0], degraded[:, :, 0])
