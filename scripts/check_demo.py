"""Check a finished demo run; exits with status 1 if the model has not learnt the toy clips.

The run's folder is data: its ``config.py``, which is code, is not executed.

Noise, a constant and a linear model fail these checks.

Legend: N clips, D numbers of one clip's latents, B samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opensora_sp.checkpoint import find_weights
from opensora_sp.config import (
    InferenceConfig,
    TrainConfig,
    load_inference_config,
    load_train_config,
)
from opensora_sp.console import report_errors
from opensora_sp.data import CorruptSample, VideoTextDataset, is_held_out, scale, toy_clip
from opensora_sp.data.toy import COLOURS, MARGIN
from opensora_sp.diffusion import RectifiedFlow, velocity_loss
from opensora_sp.json_reader import read_json
from opensora_sp.parallel import SequenceMesh
from opensora_sp.randomness import normal
from opensora_sp.sampling.contact_sheet import write_contact_sheet
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import build_pipeline
from opensora_sp.training.metrics import read_metrics, running_mean

NUM_BINS = 4
FLOORS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
# Used by no training set.
CAPTION_SEED = 8

Predict = Callable[[Tensor, Tensor], Tensor]
"""``predict(x_t [N, c, f, h, w], t [N])`` -> velocity."""


@dataclass(frozen=True)
class Check:
    """One check: its name, whether it passed, and the figures."""

    name: str
    ok: bool
    detail: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run's folder")
    parser.add_argument(
        "--train-config", default="configs/demo/train.py", help="config that the run was started by"
    )
    parser.add_argument(
        "--sample-config", default="configs/demo/sample.py", help="sampling config of the model"
    )
    parser.add_argument(
        "--heldout", default="data/toy_heldout/clips.csv", help="manifest of held-out clips"
    )
    args = parser.parse_args()

    with report_errors():
        train_cfg = load_train_config(args.train_config)
        sample_cfg = load_inference_config(args.sample_config)
        checks = check_run(args.run_dir, train_cfg, sample_cfg, args.heldout)

    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def check_run(
    run_dir: Path, train_cfg: TrainConfig, sample_cfg: InferenceConfig, heldout: str
) -> list[Check]:
    """All checks of a finished demo; writes the checked samples to ``check.png`` in ``run_dir``."""
    weights = find_weights(run_dir, ema=True)
    pipeline = build_pipeline(sample_cfg, weights, SequenceMesh(1), torch.device("cpu"))

    assert train_cfg.dataset.manifest is not None
    train, _ = encode_all(pipeline, train_cfg, train_cfg.dataset.manifest)
    held_out, texts = encode_all(pipeline, train_cfg, heldout)

    prompts = distinct_captions(8)
    swapped = swap(prompts)
    named, other = sample_backgrounds(pipeline, prompts, run_dir / "check.png")

    return [
        check_how_it_ran(read_json(run_dir / "summary.json")),
        check_loss_fell(np.array([line["loss"] for line in read_metrics(run_dir)])),
        *check_against_linear(pipeline.flow, model_predictor(pipeline, texts), train, held_out),
        check_backgrounds("background as captioned", named, list(map(background_of, prompts))),
        check_backgrounds(
            "background follows swapped captions", other, list(map(background_of, swapped))
        ),
    ]


def check_how_it_ran(summary: dict) -> Check:
    """The run was sequence-parallel on two ranks and read mp4 files."""
    files = summary["files_read"]
    ok = summary["sp_size"] == 2 and summary["switches"] > 0 and files.get(".mp4", 0) > 0
    detail = f"sp_size {summary['sp_size']}, {summary['switches']} switches, files read {files}"
    return Check("sequence-parallel, from mp4 files", ok, detail)


def check_loss_fell(losses: np.ndarray) -> Check:
    """The last running mean of the training loss is below 0.6 of the first."""
    mean = running_mean(losses)
    return Check(
        "training loss fell", bool(mean[-1] < 0.6 * mean[0]), f"{mean[0]:.3f} -> {mean[-1]:.3f}"
    )


def check_against_linear(
    flow: RectifiedFlow, predict: Predict, train: Tensor, held_out: Tensor
) -> list[Check]:
    """The held-out loss in each timestep bin is below that of the best linear predictor.

    The linear predictor has the mean and covariance of the training latents ``[N, c, f, h, w]``.
    Its variance outside their span is the one of ``FLOORS`` with the lowest held-out loss.
    """
    shape, count = tuple(held_out.shape[1:]), len(held_out)
    noise = torch.stack([normal(shape, 0, "held out", i) for i in range(count)])
    target = flow.target(held_out, noise)
    linear = LinearPredictor(train)

    checks = []
    for number in range(NUM_BINS):
        # Stratified in the bin, so that each clip has a share of its own.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
        places = (torch.arange(count) + 0.5) / count
        share = (number + places[order]) / NUM_BINS
        t = share * flow.num_timesteps
        x_t = flow.add_noise(held_out, noise, t)

        ours = velocity_loss(predict(x_t, t), target).mean().item()
        theirs = min(
            velocity_loss(linear(x_t, share, floor), target).mean().item() for floor in FLOORS
        )
        name = f"held-out loss, t in [{number / NUM_BINS:g}, {(number + 1) / NUM_BINS:g})"
        detail = f"{ours:.4f}, best linear predictor {theirs:.4f}"
        checks.append(Check(name, ours < theirs, detail))
    return checks


class LinearPredictor:
    """The affine map of least squared error from ``x_t = (1 - s) x + s n`` to ``x - n``.

    The noise ``n`` is Gaussian. In each principal direction of the data, of variance v, the map
    multiplies by ``((1-s) v - s) / ((1-s)^2 v + s^2)``.
    """

    def __init__(self, data: Tensor) -> None:
        flat = data.flatten(1).double()
        self.mean = flat.mean(0)
        # The principal axes are rows, [N, D].
        _, singular, self.axes = torch.linalg.svd(flat - self.mean, full_matrices=False)
        self.variances = singular.square() / len(flat)

    def __call__(self, x_t: Tensor, share: Tensor, floor: float) -> Tensor:
        s = share.double()[:, None]  # [B, 1]

        def slope(variance: Tensor | float) -> Tensor:
            return ((1 - s) * variance - s) / ((1 - s).square() * variance + s.square())

        offset = x_t.flatten(1).double() - (1 - s) * self.mean
        along = offset @ self.axes.T  # [B, N]
        inside = ((slope(self.variances + floor) - slope(floor)) * along) @ self.axes
        return (self.mean + inside + slope(floor) * offset).view(x_t.shape).to(x_t.dtype)


def check_backgrounds(name: str, colours: np.ndarray, wanted: Sequence[str]) -> Check:
    """At least 6 of 8 background colours ``[8, 3]`` are nearest to the named one."""
    names, palette = list(COLOURS), np.array(list(COLOURS.values()), dtype=float)
    distances = np.linalg.norm(colours[:, None] - palette[None], axis=-1)
    found = [names[i] for i in distances.argmin(1)]
    wrong = [f"{w} came out {f}" for f, w in zip(found, wanted, strict=True) if f != w]

    right = len(wanted) - len(wrong)
    detail = f"{right} of {len(wanted)}" + (f" ({', '.join(wrong)})" if wrong else "")
    return Check(name, right >= 6, detail)


def distinct_captions(count: int) -> list[str]:
    """Held-out captions; the two of each pair of neighbours differ in background."""
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
    """Mean border colours ``[8, 3]`` of samples for the prompts and for the swapped prompts.

    Both start from the same noise.
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
    """Mean colour of the margin outside all shapes, over all frames ``[F, height, width, 3]``."""
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
def encode_all(pipeline: Pipeline, cfg: TrainConfig, manifest: str) -> tuple[Tensor, list[str]]:
    """Latents ``[N, c, f, h, w]`` and captions of all clips of a manifest.

    Raises:
        ValueError: if a clip cannot be read.
    """
    dataset = VideoTextDataset(manifest, num_frames=cfg.num_frames, image_size=cfg.size)
    latents, texts = [], []
    for i in range(len(dataset)):
        clip = dataset[i]
        if isinstance(clip, CorruptSample):
            raise ValueError(
                f"got the corrupt clip {clip.path} ({clip.reason}); expected a readable one; "
                "run scripts/make_toy_clips.py again"
            )
        latents.append(pipeline.vae.encode(scale(clip.video)[None])[0])
        texts.append(clip.text)
    return torch.stack(latents), texts


if __name__ == "__main__":
    main()
