"""Cached steps and guidance intervals: computed steps, time and errors on the toy clips.

OMP_NUM_THREADS=1 python -m benchmarks cached_steps --ckpt PATH --curve curve.json

Samples 64 prompts with the same noise for each setting. An error is a video in which the judge of
the demo sees another background, colour, shape or direction than the caption has. Time is the
process's CPU time of the steps alone; all steps are timed before and after the others. The
difference is the mean absolute one of the latents from all steps, relative to these. For comparison
there are samplings in fewer steps.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_sp.config import load_inference_config
from opensora_sp.data.toy import ToyClip, is_held_out, toy_captions
from opensora_sp.parallel import SequenceMesh
from opensora_sp.sampling.decoding import collected
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of, steps_of_video

# The scripts are not part of a package.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from check_demo import captioned_clips, load_pipeline
from toy_judge import Seen, judge

NUM_CLIPS, BATCH = 64, 16
THRESHOLDS = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
INTERVALS = ((0.0, 0.5), (0.2, 0.8), (0.5, 1.0), (0.3, 1.0), (0.0, 0.9))
BOTH = {"cache_threshold": 0.1, "guidance_interval": (0.3, 1.0)}
FEWER = (13, 6)


@dataclass(frozen=True)
class Measured:
    """A setting: its steps, CPU seconds of denoising, and errors of ``NUM_CLIPS`` videos."""

    name: str
    computed: int
    guided: int
    seconds: float
    errors: int
    latents: Tensor


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="configs/demo/sample.py", help="its sampling config")
    parser.add_argument("--ckpt", required=True, metavar="PATH", help="a model of the toy clips")
    parser.add_argument("--curve", required=True, metavar="FILE", help="the model's curve")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="SVG of the cached steps")


def run(args: argparse.Namespace) -> dict[str, Any]:
    cfg = load_inference_config(args.config, values={"scheduler.cache_curve": args.curve})
    pipeline = load_pipeline(Path(args.ckpt), cfg)
    # All captions that training sets leave out, and others.
    most = sum(map(is_held_out, toy_captions()))
    clips = captioned_clips(most, held_out=True)
    clips += captioned_clips(NUM_CLIPS - most, held_out=False)

    settings: list[dict[str, Any]] = [{}]
    settings += [{"cache_threshold": threshold} for threshold in THRESHOLDS]
    settings += [{"guidance_interval": interval} for interval in INTERVALS]
    settings += [BOTH, *({"num_sampling_steps": number} for number in FEWER), {}]
    results = [measure(pipeline, clips, options) for options in settings]
    whole = (results[0].seconds + results.pop().seconds) / 2
    exact = results[0].latents
    print("| setting | computed | guided | times faster | errors of 64 | difference |")
    print("|---|---|---|---|---|---|")
    for result in results:
        difference = relative(result.latents, exact)
        print(
            f"| `{result.name}` | {result.computed} | {result.guided} | "
            f"{whole / result.seconds:.2f} | {result.errors} | {difference:.3f} |"
        )
    if args.picture is not None:
        draw(results[: 1 + len(THRESHOLDS)], exact, whole, args.picture)
    names = ("name", "computed", "guided", "seconds", "errors")
    figures = [{name: getattr(result, name) for name in names} for result in results]
    return {"whole": whole, "settings": figures}


def relative(latents: Tensor, exact: Tensor) -> float:
    """Mean absolute difference, relative to the mean of ``exact``."""
    return ((latents - exact).abs().mean() / exact.abs().mean()).item()


def measure(pipeline: Pipeline, clips: list[ToyClip], options: dict[str, Any]) -> Measured:
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or "all steps"
    scheduler = {**pipeline.cfg.scheduler, **options}
    cfg = pipeline.cfg.model_copy(update={"scheduler": scheduler})
    changed = Pipeline(cfg, pipeline.model, pipeline.vae, pipeline.text_encoder, pipeline.device)
    requests = requests_of(cfg, [clip.caption for clip in clips])

    seconds, errors, sampled = 0.0, 0, list[Tensor]()
    for first in range(0, len(clips), BATCH):
        batch = requests[first : first + BATCH]
        text = changed.encode(batch)
        start = time.process_time()
        latents = changed.latents(batch, text=text)
        seconds += time.process_time() - start
        sampled.append(latents)
        videos = collected(changed.frames(batch, [latents], SequenceMesh(1)), len(batch))
        for clip, video in zip(clips[first:], videos, strict=False):
            errors += judge(video) != Seen.of(clip)

    steps = steps_of_video(cfg, requests[0].shape)
    computed, guided = (sum(getattr(step, key) for step in steps) for key in ("computed", "guided"))
    print(f"{name}: {computed} computed, {guided} guided, {seconds:.1f} s, {errors} errors")
    return Measured(name, computed, guided, seconds, errors, torch.cat(sampled))


def draw(results: list[Measured], exact: Tensor, whole: float, path: Path) -> None:
    """Difference and time over the number of computed steps."""
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    differences, times = figure.subplots(1, 2)
    computed = [result.computed for result in results]
    differences.plot(computed, [relative(result.latents, exact) for result in results], "o-")
    differences.set(xlabel="computed steps", ylabel="relative difference", ylim=(0, None))
    times.plot(computed, [result.seconds / whole for result in results], "o-", color="tab:orange")
    times.set(xlabel="computed steps", ylabel="time, relative to all steps", ylim=(0, 1.1))
    for axes in (differences, times):
        axes.set_xlim(0, max(computed) + 1)
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
