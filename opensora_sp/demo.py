"""Did the demo work? Checks of a finished run that noise, a constant or a linear model would not
pass.

Legend: N clips, D numbers of one clip's latents, B samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .checkpoint import find_weights
from .config import InferenceConfig, TrainConfig
from .data import BrokenClip, VideoTextDataset, is_held_out, scale, toy_clip
from .data.toy import COLOURS, MARGIN
from .diffusion import RectifiedFlow, velocity_loss
from .parallel import SequenceMesh
from .randomness import normal
from .sampling.contact_sheet import write_contact_sheet
from .sampling.decoding import collected
from .sampling.pipeline import Pipeline
from .sampling.requests import requests_of
from .sampling.run import build_pipeline
from .training.metrics import read_metrics, running_mean

NUM_BINS = 4
FLOORS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
CAPTION_SEED = 8  # captions for this check only
Predict = Callable[[Tensor, Tensor], Tensor]
"""``predict(x_t [N, c, f, h, w], t [N])`` -> velocity."""


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it holds, the numbers."""

    name: str
    ok: bool
    detail: str


def check_run(
    run_dir: Path, train_cfg: TrainConfig, sample_cfg: InferenceConfig, heldout: str
) -> list[Finding]:
    """All checks of a finished demo; writes ``check.png``, the samples looked at, into the run's
    folder.
    """
    weights = find_weights(run_dir, ema=True)
    pipeline = build_pipeline(sample_cfg, weights, SequenceMesh(1), torch.device("cpu"))
    assert train_cfg.dataset.manifest is not None
    train = encode_all(pipeline, _dataset(train_cfg, train_cfg.dataset.manifest))[0]
    held, texts = encode_all(pipeline, _dataset(train_cfg, heldout))
    prompts = distinct_captions(8)
    straight, swapped = sample_backgrounds(pipeline, prompts, run_dir / "check.png")
    return [
        check_how_it_ran(json.loads((run_dir / "summary.json").read_text())),
        check_loss_fell(np.array([line["loss"] for line in read_metrics(run_dir)])),
        *check_against_linear(pipeline.flow, model_predictor(pipeline, texts), train, held),
        check_backgrounds("background as captioned", straight, [background_of(p) for p in prompts]),
        check_backgrounds(
            "background follows swapped captions",
            swapped,
            [background_of(p) for p in swap(prompts)],
        ),
    ]


def check_how_it_ran(summary: dict) -> Finding:
    """The run shared clips between two ranks and read them from mp4 files."""
    ok = (
        summary["sp_size"] == 2
        and summary["switches"] > 0
        and summary["files_read"].get(".mp4", 0) > 0
    )
    detail = f"sp_size {summary['sp_size']}, {summary['switches']} switches, files read {summary['files_read']}"
    return Finding("sequence-parallel, from mp4 files", ok, detail)


def check_loss_fell(losses: np.ndarray) -> Finding:
    """The last running mean of the training loss is below 0.6 of the first."""
    mean = running_mean(losses)
    return Finding(
        "training loss fell", bool(mean[-1] < 0.6 * mean[0]), f"{mean[0]:.3f} -> {mean[-1]:.3f}"
    )


def check_against_linear(
    flow: RectifiedFlow, predict: Predict, train: Tensor, held: Tensor
) -> list[Finding]:
    """Held-out loss in each timestep bin, against the best linear predictor of the velocity from
    ``x_t``.

    The linear predictor has the mean and covariance of the training latents ``[N, c, f, h, w]``;
    the variance that it supposes outside their span is the one that serves it best on the held-out
    clips.
    """
    findings = []
    noise = torch.stack([normal(tuple(held.shape[1:]), 0, "held out", i) for i in range(len(held))])
    target = flow.target(held, noise)
    linear = LinearPredictor(train)
    for number in range(NUM_BINS):
        places = (torch.arange(len(held)) + 0.5) / len(held)
        share = (
            number
            + places[torch.randperm(len(held), generator=torch.Generator().manual_seed(number))]
        ) / NUM_BINS
        x_t = flow.add_noise(held, noise, share * flow.num_timesteps)
        ours = velocity_loss(predict(x_t, share * flow.num_timesteps), target).mean().item()
        theirs = min(
            velocity_loss(linear(x_t, share, floor), target).mean().item() for floor in FLOORS
        )
        name = f"held-out loss, t in [{number / NUM_BINS:g}, {(number + 1) / NUM_BINS:g})"
        findings.append(
            Finding(name, ours < theirs, f"{ours:.4f}, best linear predictor {theirs:.4f}")
        )
    return findings


class LinearPredictor:
    """The affine map of least squared error from ``x_t = (1 - s) x + s n`` to ``x - n`` for
    Gaussian n.

    In each principal direction of the data, of variance v, it multiplies by ``((1-s) v - s) /
    ((1-s)^2 v + s^2)``.
    """

    def __init__(self, data: Tensor) -> None:
        flat = data.flatten(1).double()
        self.mean = flat.mean(0)
        _, singular, self.axes = torch.linalg.svd(
            flat - self.mean, full_matrices=False
        )  # axes [N, D]
        self.variances = singular.square() / len(flat)

    def __call__(self, x_t: Tensor, share: Tensor, floor: float) -> Tensor:
        s = share.double()[:, None]  # [B, 1]

        def slope(variance: Tensor | float) -> Tensor:
            return ((1 - s) * variance - s) / ((1 - s).square() * variance + s.square())

        offset = x_t.flatten(1).double() - (1 - s) * self.mean
        along = offset @ self.axes.T  # [B, N]
        inside = ((slope(self.variances + floor) - slope(floor)) * along) @ self.axes
        return (self.mean + inside + slope(floor) * offset).view(x_t.shape).to(x_t.dtype)


def check_backgrounds(name: str, colours: np.ndarray, wanted: Sequence[str]) -> Finding:
    """At least 6 of 8 background colours ``[8, 3]`` are nearest to the named one."""
    names, palette = list(COLOURS), np.array(list(COLOURS.values()), dtype=float)
    distances = np.linalg.norm(colours[:, None] - palette[None], axis=-1)
    found = [names[i] for i in distances.argmin(1)]
    right = sum(f == w for f, w in zip(found, wanted, strict=True))
    wrong = [f"{w} came out {f}" for f, w in zip(found, wanted, strict=True) if f != w]
    return Finding(
        name, right >= 6, f"{right} of {len(wanted)}" + (f" ({', '.join(wrong)})" if wrong else "")
    )


def distinct_captions(count: int) -> list[str]:
    """Captions that toy training sets leave out, neighbours in pairs differing in background."""
    captions: list[str] = []
    index = 0
    while len(captions) < count:
        caption = toy_clip(CAPTION_SEED, index).caption
        index += 1
        if not is_held_out(caption) or caption in captions:
            continue
        if len(captions) % 2 == 0 or background_of(caption) != background_of(captions[-1]):
            captions.append(caption)
    return captions


def background_of(caption: str) -> str:
    return caption.split()[-2]


def swap(prompts: Sequence[str]) -> list[str]:
    """Exchange the two prompts of each pair."""
    return [prompts[i ^ 1] for i in range(len(prompts))]


def sample_backgrounds(
    pipeline: Pipeline, prompts: list[str], sheet: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Mean border colours ``[8, 3]`` of samples for the prompts and, from the same noise, for the
    swapped prompts.
    """
    shown, colours = [], []
    for texts in (prompts, swap(prompts)):
        batch = requests_of(pipeline.cfg, texts)
        decoded = pipeline.frames(batch, [pipeline.latents(batch)], SequenceMesh(1))
        frames = collected(decoded, len(batch))
        shown += list(zip(texts, frames, strict=True))
        colours.append(np.stack([border_colour(video) for video in frames]))
    write_contact_sheet(sheet, shown[: len(prompts)])
    return colours[0], colours[1]


def border_colour(frames: np.ndarray) -> np.ndarray:
    """Mean colour of the margin that shapes keep away from, over all frames ``[F, height, width,
    3]``.
    """
    edge = max(1, int(frames.shape[1] * MARGIN))
    inner = np.zeros(frames.shape[1:3], dtype=bool)
    inner[edge:-edge, edge:-edge] = True
    return frames[:, ~inner].reshape(-1, 3).mean(0)


def model_predictor(pipeline: Pipeline, texts: list[str]) -> Predict:
    """The captioned prediction of the pipeline's model."""

    @torch.no_grad()
    def predict(x_t: Tensor, t: Tensor) -> Tensor:
        y, mask = pipeline.text_encoder.encode(texts)
        height, width = (torch.full((len(texts),), float(side)) for side in pipeline.cfg.size)
        fps = torch.full((len(texts),), pipeline.cfg.fps)
        return pipeline.model(x_t, t, y, mask, fps=fps, height=height, width=width)

    return predict


@torch.no_grad()
def encode_all(pipeline: Pipeline, dataset: VideoTextDataset) -> tuple[Tensor, list[str]]:
    """Latents ``[N, c, f, h, w]`` and captions of a set."""
    latents, texts = [], []
    for i in range(len(dataset)):
        clip = dataset[i]
        if isinstance(clip, BrokenClip):
            raise ValueError(
                f"got a clip that cannot be read: {clip.path} ({clip.reason}); make the toy set "
                "again"
            )
        latents.append(pipeline.vae.encode(scale(clip.video)[None])[0])
        texts.append(clip.text)
    return torch.stack(latents), texts


def _dataset(cfg: TrainConfig, manifest: str) -> VideoTextDataset:
    return VideoTextDataset(manifest, num_frames=cfg.num_frames, image_size=cfg.size)
