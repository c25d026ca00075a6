"""Check a finished demo run; exits with status 1 if the model has not learnt the toy clips.

The run's folder is data: its ``config.py``, which is code, is not executed.

Noise, a constant and a linear model fail these checks.

Legend: N clips, D numbers of one clip's latents, B samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from textwrap import wrap

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from toy_judge import Seen, judge

from opensora_sp.checkpoint import find_weights
from opensora_sp.common.console import report_errors
from opensora_sp.common.files import read_json
from opensora_sp.config import (
    InferenceConfig,
    TrainConfig,
    load_inference_config,
    load_train_config,
)
from opensora_sp.data import CorruptSample, VideoTextDataset, scale, to_frames, toy_clip
from opensora_sp.data.randomness import normal
from opensora_sp.data.toy import ToyClip, is_held_out, toy_captions
from opensora_sp.diffusion import RectifiedFlow, velocity_loss
from opensora_sp.encoders import LatentEncoder
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.contact_sheet import draw_text
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import build_pipeline
from opensora_sp.training.metrics import read_metrics, running_mean

TRAIN_CONFIG, SAMPLE_CONFIG = "configs/demo/train.py", "configs/demo/sample.py"
HELD_OUT = "data/toy_heldout/clips.csv"
# Below, mostly noise outside the span of the clips is left, which the linear model knows exactly.
BIN_EDGES = (0.25, 0.5, 0.75, 1.0)
FLOORS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
# Used by no training set.
CLIP_SEED = 8
NUM_CLIPS = 16
# Of these, how many samples show an attribute of their caption.
LEAST_RIGHT = {"background": 12, "colour": 12, "shape": 10, "direction": 12}

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
        "--prompts", type=int, metavar="N", help="only judge samples of N captions of each kind"
    )
    args = parser.parse_args()

    with report_errors():
        sample_cfg = load_inference_config(SAMPLE_CONFIG)
        if args.prompts:
            checks = check_samples(args.run_dir, sample_cfg, args.prompts)
        else:
            checks = check_run(args.run_dir, load_train_config(TRAIN_CONFIG), sample_cfg)

    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def check_run(run_dir: Path, train_cfg: TrainConfig, sample_cfg: InferenceConfig) -> list[Check]:
    """All checks of a finished demo; writes its samples to ``check.gif``."""
    pipeline = load_pipeline(run_dir, sample_cfg)
    assert train_cfg.dataset.manifest is not None
    train, _ = encode_all(pipeline, train_cfg, train_cfg.dataset.manifest)
    held_out, texts = encode_all(pipeline, train_cfg, HELD_OUT)

    clips = captioned_clips(NUM_CLIPS, held_out=True)
    prompts = [clip.caption for clip in clips]
    videos = sample(pipeline, prompts)
    shown = list(zip(prompts, videos, strict=True))
    write_animation(run_dir / "check.gif", shown, sample_cfg.fps)

    sessions = (run_dir / "sessions.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        check_how_it_ran(read_json(run_dir / "summary.json"), sessions),
        check_loss_fell(np.array([line["loss"] for line in read_metrics(run_dir)])),
        *check_against_linear(pipeline.process, model_predictor(pipeline, texts), train, held_out),
        check_decoded(pipeline.vae, clips, sample_cfg),
        *check_attributes("as captioned", list(map(judge, videos)), clips),
    ]


def check_samples(run_dir: Path, sample_cfg: InferenceConfig, number: int) -> list[Check]:
    """The attributes of samples of ``number`` held-out captions, and of as many others.

    Writes the first held-out ones to ``check.gif``.
    """
    pipeline = load_pipeline(run_dir, sample_cfg)
    checks = []
    for name, held_out in (("trained", False), ("held out", True)):
        clips = captioned_clips(number, held_out=held_out)
        prompts = [clip.caption for clip in clips]
        videos = sample(pipeline, prompts)
        checks += check_attributes(name, list(map(judge, videos)), clips)

    shown = list(zip(prompts, videos, strict=True))
    write_animation(run_dir / "check.gif", shown[:NUM_CLIPS], sample_cfg.fps)
    return checks


def load_pipeline(run_dir: Path, sample_cfg: InferenceConfig) -> Pipeline:
    """The model of a run, or of a folder of weights, on one process."""
    weights = find_weights(run_dir, ema=True)
    return build_pipeline(sample_cfg, weights, SequenceMesh(1), torch.device("cpu"))


def check_how_it_ran(summary: dict, sessions: Sequence[str]) -> Check:
    """The run was sequence-parallel, first on two ranks, and read mp4 files."""
    files, sizes = summary["files_read"], [json.loads(line)["sp_size"] for line in sessions]
    is_parallel = sizes[0] == 2 and min(sizes) > 1 and summary["switches"] > 0
    ok = is_parallel and files.get(".mp4", 0) > 0
    detail = f"sp_size {sizes}, {summary['switches']} switches, files read {files}"
    return Check("sequence-parallel, from mp4 files", ok, detail)


def check_loss_fell(losses: np.ndarray) -> Check:
    """The last running mean of the training loss is below 0.6 of the first."""
    mean = running_mean(losses)
    fell = bool(mean[-1] < 0.6 * mean[0])
    return Check("training loss fell", fell, f"{mean[0]:.3f} -> {mean[-1]:.3f}")


def check_against_linear(
    flow: RectifiedFlow, predict: Predict, train: Tensor, held_out: Tensor
) -> list[Check]:
    """The held-out loss in each bin of noise levels is below that of the best linear predictor.

    The linear predictor has the mean and covariance of the training latents ``[N, c, f, h, w]``.
    Its variance outside their span is the one of ``FLOORS`` with the lowest held-out loss.
    """
    shape, count = tuple(held_out.shape[1:]), len(held_out)
    noise = torch.stack([normal(shape, 0, "held out", i) for i in range(count)])
    target = flow.target(held_out, noise)
    linear = LinearPredictor(train)

    checks = []
    for number, (low, high) in enumerate(pairwise(BIN_EDGES)):
        # Stratified in the bin, so that each clip has a share of its own.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
        places = (torch.arange(count) + 0.5) / count
        share = low + places[order] * (high - low)
        t = share * flow.num_timesteps
        x_t = flow.add_noise(held_out, noise, t)

        ours = velocity_loss(predict(x_t, t), target).mean().item()
        theirs = min(
            velocity_loss(linear(x_t, share, floor), target).mean().item() for floor in FLOORS
        )
        name = f"held-out loss, t in [{low:g}, {high:g})"
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


def check_attributes(name: str, seen: Sequence[Seen], clips: Sequence[ToyClip]) -> list[Check]:
    """Of 16 videos, at least ``LEAST_RIGHT`` show each attribute of the clips; so of others."""
    checks = []
    for attribute, least in LEAST_RIGHT.items():
        wanted = [getattr(clip, attribute) for clip in clips]
        found = [getattr(video, attribute) for video in seen]
        wrong = [f"{w} came out {f}" for w, f in zip(wanted, found, strict=True) if w != f]

        right = len(wanted) - len(wrong)
        detail = f"{right} of {len(wanted)}" + (f" ({', '.join(wrong)})" if wrong else "")
        checks.append(
            Check(f"{name}: {attribute}", right * NUM_CLIPS >= least * len(wanted), detail)
        )
    return checks


def check_decoded(vae: LatentEncoder, clips: Sequence[ToyClip], cfg: InferenceConfig) -> Check:
    """The judge finds every attribute in true clips that were encoded and decoded."""
    assert isinstance(cfg.num_frames, int)
    wrong = []
    for clip in clips:
        frames = clip.draw(cfg.num_frames, cfg.size[0])
        video = scale(torch.from_numpy(frames).permute(3, 0, 1, 2)[None])
        decoded = vae.decode(vae.encode(video), num_frames=cfg.num_frames)
        if judge(to_frames(decoded[0])) != Seen.of(clip):
            wrong.append(clip.caption)

    detail = f"{len(clips) - len(wrong)} of {len(clips)}" + (f" (not {wrong})" if wrong else "")
    return Check("judge of encoded and decoded clips", not wrong, detail)


def captioned_clips(number: int, *, held_out: bool) -> list[ToyClip]:
    """Clips with different captions, all or none of which training sets leave out.

    Raises:
        ValueError: if there are fewer such captions.
    """
    most = sum(is_held_out(caption) == held_out for caption in toy_captions())
    if number > most:
        raise ValueError(
            f"got {number} clips to draw; expected at most {most}, the captions that training "
            f"sets {'leave out' if held_out else 'have'}; lower --prompts"
        )

    clips: dict[str, ToyClip] = {}
    for clip in (toy_clip(CLIP_SEED, index) for index in count()):
        if len(clips) == number:
            break
        if is_held_out(clip.caption) == held_out:
            clips[clip.caption] = clip
    return list(clips.values())


def sample(pipeline: Pipeline, prompts: list[str]) -> list[np.ndarray]:
    """A video uint8 ``[F, height, width, 3]`` for each prompt."""
    batch = requests_of(pipeline.cfg, prompts)
    decoded = pipeline.frames(batch, [pipeline.latents(batch)], SequenceMesh(1))
    return collected(decoded, len(batch))


def write_animation(path: Path, shown: list[tuple[str, np.ndarray]], fps: float) -> None:
    """Write a GIF of videos ``[F, height, width, 3]`` in lines of four, each above its title."""
    across, side, margin, line = 4, 128, 6, 18
    cell = (side + 2 * margin, side + margin + 3 * line)
    size = (across * cell[0], -(-len(shown) // across) * cell[1])

    pages = []
    for number in range(len(shown[0][1])):
        page = Image.new("RGB", size, "white")
        for place, (title, frames) in enumerate(shown):
            left, top = place % across * cell[0] + margin, place // across * cell[1] + margin
            frame = Image.fromarray(frames[number]).resize((side, side), Image.Resampling.BILINEAR)
            page.paste(frame, (left, top))

            for row, words in enumerate(wrap(title, 20)):
                place_of_text = (left, top + side + row * line)
                draw_text(ImageDraw.Draw(page), place_of_text, words, size=12)
        pages.append(page)

    pages[0].save(path, save_all=True, append_images=pages[1:], duration=round(1000 / fps), loop=0)


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
