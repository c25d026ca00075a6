"""Clips per second of the training loader against a plain loop over PyAV, one decoding thread each.

OMP_NUM_THREADS=1 python -m benchmarks data_loading --workers 2

Both decode the same frames of the same files to the same clips, which is checked first. They take
turns; the result is the median of the ratios.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from opensora_sp.data.dataset import Clip, ClipShape, Sample, VideoTextDataset
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.transforms import resize_and_crop, scale
from opensora_sp.data.video import write_video

FRAMES, SIZE = 48, 480  # of each file


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--clips", type=int, default=24, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    shape = ClipShape(32, 240, 240)

    with tempfile.TemporaryDirectory() as folder:
        manifest = write_files(Path(folder), args.files)
        dataset = VideoTextDataset(str(manifest))
        samples = [Sample(number % args.files, 0, shape) for number in range(args.clips)]
        loader = DataLoader(
            dataset,
            batch_sampler=[[sample] for sample in samples],
            collate_fn=list,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
        )
        paths = [dataset.rows[sample.clip].path for sample in samples]

        # Also starts the workers.
        for path, (clip,) in zip(paths[: args.files], loader):
            assert isinstance(clip, Clip)
            assert torch.equal(scale(clip.video), read_plainly(path, shape))

        ways = [
            lambda: (read_plainly(path, shape) for path in paths),
            lambda: (scale(clip.video) for (clip,) in loader),
        ]
        rounds = [[args.clips / seconds(way) for way in ways] for _ in range(args.rounds)]

    plain, loaded = (median(round[way] for round in rounds) for way in (0, 1))
    ratios = [loaded / plain for plain, loaded in rounds]
    print(
        f"{shape.num_frames} frames of {SIZE}x{SIZE} to {shape.height}x{shape.width}, {args.clips} "
        "clips a round"
    )
    print(
        f"plain loop {plain:.2f} clips/s, loader with {args.workers} workers {loaded:.2f} clips/s"
    )
    print(
        f"ratio: median {median(ratios):.2f} of {args.rounds} rounds: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )
    return {"plain_clips_per_second": plain, "loader_clips_per_second": loaded, "ratios": ratios}


def write_files(folder: Path, count: int) -> Path:
    for number in range(count):
        write_video(folder / f"{number}.mp4", toy_clip(0, number).draw(FRAMES, SIZE), fps=24)
    rows = [f"{number}.mp4,a clip\n" for number in range(count)]
    (folder / "clips.csv").write_text("".join(["path,text\n", *rows]))
    return folder / "clips.csv"


def read_plainly(path: Path, shape: ClipShape) -> Tensor:
    """The middle frames of a file, read without a loader."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        first = (stream.frames - shape.num_frames) // 2
        decoded = islice(container.decode(stream), first, first + shape.num_frames)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in decoded])
    return scale(resize_and_crop(frames, (shape.height, shape.width)))


def seconds(way: Callable[[], Iterable[object]]) -> float:
    start = time.perf_counter()
    for _ in way():
        pass
    return time.perf_counter() - start
