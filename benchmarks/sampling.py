"""Time of a sampling step on 2 processes against 1, text encodings, and memory of decoding.

python -m benchmarks sampling --repeats 5

Each process computes with one thread. In each repeat one process samples while the other waits,
then both sample. Reported are wall time and CPU time; other programs hardly change the latter. Also
counted: text encodings in a sampling loop, and the peak of live bytes in decoding, by the length of
a video.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.processes import on_ranks
from opensora_sp.config import InferenceConfig
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.models import build_model
from opensora_sp.models.layers import CaptionEmbedder, CrossAttention
from opensora_sp.parallel import SequenceMesh, parallelize, unwrap
from opensora_sp.planner.live_peak import LivePeak
from opensora_sp.sampling.decoding import decode
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of

MODEL = dict(
    hidden_size=288,
    depth=4,
    num_heads=4,
    caption_channels=64,
    model_max_length=24,
    pred_sigma=False,
)
SCALES = {"guidance": 4.0, "no guidance": 1.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="sampling steps of one repeat")
    parser.add_argument("--num-frames", type=int, default=16)
    parser.add_argument(
        "--size", type=int, default=128, help="side of a frame in pixels; 8 pixels make a patch"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    return {"decoding_peak_mb": decoding_peaks(), "steps": on_ranks(2, time_steps, args)}


def time_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the times of a step with and without guidance. Collective."""
    rank, meshes, timed = dist.get_rank(), {1: None, 2: SequenceMesh(2)}, {}
    for name, scale in SCALES.items():
        pipeline = make_pipeline(args, scale)
        request = requests_of(pipeline.cfg, ["a red circle moving left on a white background"])
        if rank == 0 and name == "guidance":
            count_encodings(pipeline, request)

        text, tokens = pipeline.encode(request), args.num_frames * (args.size // 8) ** 2
        seconds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for repeat in range(args.repeats + 1):
            for processes, mesh in meshes.items():
                if mesh is not None:
                    parallelize(pipeline.model, mesh)
                dist.barrier()
                if rank < processes:
                    wall, cpu = time.perf_counter(), time.process_time()
                    pipeline.latents(request, text=text)
                    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                    # The first repeat is warm-up.
                    if repeat:
                        seconds[processes].append((wall / args.steps, cpu / args.steps))
                unwrap(pipeline.model)

        if rank == 0:
            print(f"{name}, {tokens} tokens a video", flush=True)
            timed[name] = compare(seconds)
    return timed


def compare(seconds: dict[int, list[tuple[float, float]]]) -> dict[str, list[float]]:
    """Print wall and CPU time of a step on 1 and 2 processes; returns their ratios."""
    compared = {}
    for place, kind in enumerate(("seconds a step", "of them computing")):
        one, two = ([times[place] for times in seconds[processes]] for processes in (1, 2))
        ratios = [b / a for a, b in zip(one, two, strict=True)]
        compared[kind] = ratios
        print(
            f"  {kind}: {median(one):.3f} on 1 process, {median(two):.3f} on 2; ratio, "
            f"median of {len(ratios)}: {median(ratios):.3f} (of {min(ratios):.3f} to "
            f"{max(ratios):.3f})",
            flush=True,
        )
    return compared


def make_pipeline(args: argparse.Namespace, scale: float) -> Pipeline:
    torch.manual_seed(0)
    vae, text_encoder = PatchPoolVAE((1, 4, 4)), HashedBagOfWords(width=64, max_length=24)
    model = build_model("STDiT3", in_channels=vae.channels, **MODEL).requires_grad_(False)
    cfg = InferenceConfig(
        num_frames=args.num_frames,
        image_size=(args.size, args.size),
        precision="fp32",
        model=dict(type="STDiT3", in_channels=vae.channels, **MODEL),
        vae=dict(type="PatchPoolVAE", pool=(1, 4, 4)),
        text_encoder=dict(type="HashedBagOfWords", width=64, max_length=24),
        scheduler=dict(type="rflow", num_sampling_steps=args.steps, cfg_scale=scale),
    )
    return Pipeline(cfg, model, vae, text_encoder, torch.device("cpu"))


def count_encodings(pipeline: Pipeline, request: list) -> None:
    """Count calls of the caption embedder and of the cross-attention keys in six steps."""
    calls: Counter = Counter()
    parts = {CaptionEmbedder: "y_proj", CrossAttention: "kv_linear"}
    hooks = []
    for module in pipeline.model.modules():
        part = parts.get(type(module))
        if part is not None:
            hooks.append(
                getattr(module, part).register_forward_hook(
                    lambda *_, part=part: calls.update([part])
                )
            )

    process = pipeline.process
    pipeline.process = replace(process, num_sampling_steps=6)
    pipeline.looped(request)
    pipeline.process = process
    for hook in hooks:
        hook.remove()

    blocks = sum(isinstance(module, CrossAttention) for module in pipeline.model.modules())
    print(
        f"a loop of 6 steps: text embedded {calls['y_proj']} x, keys made "
        f"{calls['kv_linear'] / blocks:g} x a block"
    )


class Frames(nn.Module):
    """A decoder with one convolution per frame, four frames at a time."""

    channels, chunk_frames, chunk_latent_frames, micro_batch_size = 4, 1, 1, 4

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 3, (1, 8, 8), stride=(1, 8, 8))

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        return num_frames, height // 8, width // 8

    def decode(self, latents: torch.Tensor, *, num_frames: int) -> torch.Tensor:
        return self.up(latents)[:, :, :num_frames]


def decoding_peaks() -> dict[int, float]:
    vae, size = Frames().requires_grad_(False), (256, 256)
    peaks = {}
    for num_frames in (8, 32, 128):
        latents = torch.randn(1, 4, num_frames, 32, 32)
        with LivePeak() as memory:
            for _ in decode(
                vae, [latents], num_frames=num_frames, size=size, overlap=1, mesh=SequenceMesh(1)
            ):
                pass
        peaks[num_frames] = memory.peak / 1e6
    print(
        "decoding, peak of live MB:",
        json.dumps({f"{n} frames": round(peak, 1) for n, peak in peaks.items()}),
    )
    return peaks
