"""What is decoded or requested is bounded, whatever headers state, and refused in a sentence."""

from __future__ import annotations

import os
import re
import resource
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from runs import ROOT

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.adapters import open_adapters
from opensora_sp.checkpoint.checkpoint_folder import FORMAT, resolve_inside
from opensora_sp.checkpoint.reader import open_weights, saved_config
from opensora_sp.cli.sample import parse
from opensora_sp.common.files import check_writable
from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.data import video
from opensora_sp.data.dataset import Clip, ClipShape, CorruptSample, Sample, VideoTextDataset
from opensora_sp.data.index import check_captions, index_files, read_captions
from opensora_sp.data.limits import Budget, Limits
from opensora_sp.data.video import count_frames, probe, read_frames, read_video, write_video
from opensora_sp.runtime.cost_models import read_cost_model
from opensora_sp.runtime.run_lock import Holder
from opensora_sp.sampling import read_prompts
from opensora_sp.sampling.requests import check_requests, requests_of
from opensora_sp.sampling.run import preflight
from opensora_sp.training.metrics import read_metrics
from opensora_sp.training.trackers import WandbTracker

SAMPLE = str(ROOT / "configs" / "demo" / "sample.py")
TRAIN = str(ROOT / "configs" / "demo" / "train.py")
MEMORY = 256 << 20
within = partial(Budget.of, None)
READERS = [count_frames, probe, read_frames, lambda path: read_video(path, num_frames=1)]


def refusal_within(num_bytes: int, function: Callable[[], object]) -> str:
    """The type and text of what a function raises in a child that may allocate so many bytes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
        try:
            message = f"nothing: {function()}"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write_end, message.encode()[:4000])
        os._exit(0)

    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message


def png(height: int, width: int, rows: int | None = None) -> bytes:
    """A black image, of which only so many rows may be there."""

    def chunk(name: bytes, data: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + end

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * (1 + 3 * width) * (height if rows is None else rows), 9)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def mov(path: Path, *images: bytes) -> Path:
    """A video of 48x64 pixels, as its header states, whose frames are PNGs."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=24)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "rgb24"
        for number, image in enumerate(images):
            packet = av.Packet(image)
            packet.stream, packet.time_base = stream, Fraction(1, 24)
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            container.mux(packet)
    return path


def raw_avi(path: Path, side: int) -> Path:
    """A video of 48x64 pixels, whose header states another size."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=24)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "bgr24"
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
    data = bytearray(path.read_bytes())
    size = data.index(b"strf") + 12
    data[size : size + 8] = struct.pack("<ii", side, side)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    tmp_path: Path, reader: Callable[[Path], object]
) -> None:
    # 432 MB as pixels; the decoder would allocate them for the first row.
    (tmp_path / "bomb.png").write_bytes(png(12_000, 12_000, rows=9))
    refusal = refusal_within(MEMORY, lambda: reader(tmp_path / "bomb.png"))
    assert refusal.startswith("ValueError") and "no size, or a larger one" in refusal
    assert "expected at most 67,108,864 pixels in a frame (limits.frame_pixels)" in refusal


def test_a_frame_is_larger_than_its_header_states(tmp_path: Path) -> None:
    bomb = png(12_000, 12_000, rows=9)
    first, second = (
        mov(tmp_path / f"{number}.mov", *[png(48, 64)] * number, bomb) for number in range(2)
    )
    assert count_frames(second) == 2 and len(read_video(second, num_frames=1, start=0)[0]) == 1
    reads = [
        lambda: read_frames(first),
        lambda: read_frames(second),
        lambda: read_video(second, num_frames=1, start=1),
    ]
    for read in reads:
        refusal = refusal_within(MEMORY, read)
        assert "got a frame that FFmpeg refuses to decode" in refusal
        assert "expected at most 67,108,864 pixels (limits.frame_pixels)" in refusal


@pytest.mark.parametrize("side", [20_000, 100_000])
@pytest.mark.parametrize("reader", READERS)
def test_a_header_states_a_size_that_is_too_large(
    tmp_path: Path, reader: Callable[[Path], object], side: int
) -> None:
    path = raw_avi(tmp_path / "claims.avi", side)
    refusal = refusal_within(MEMORY, lambda: reader(path))
    assert "got a file whose frames have no size, or a larger one; expected at most" in refusal


def test_large_images_are_a_question_of_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(300, 400))
    assert read_frames(path, Limits(frame_pixels=120_000)).shape == (1, 300, 400, 3)
    with pytest.raises(ValueError, match=r"expected at most 119,999 \(limits.frame_pixels\)"):
        read_frames(path, Limits(frame_pixels=119_999))

    found = index_files([path], limits=Limits(frame_pixels=119_999))
    assert "limits.frame_pixels" in found.corrupt[0].reason and not found.entries


@pytest.mark.parametrize("suffix", ["gif", "png"])
def test_an_image_of_too_many_bytes_is_not_read(tmp_path: Path, suffix: str) -> None:
    """FFmpeg looks for the end of an image, or of an animation's frame, in all of its file."""
    path = tmp_path / f"sparse.{suffix}"
    Image.new("RGB", (64, 48)).save(path)
    assert count_frames(path) == 1
    os.truncate(path, 1 << 40)
    for reader in READERS:
        refusal = refusal_within(MEMORY, lambda reader=reader: reader(path))
        assert "or an image of at most 8 bytes for each of limits.frame_pixels" in refusal


def test_every_layout_of_ranks_refuses_the_same_clips(tmp_path: Path) -> None:
    """Otherwise another number of ranks takes other substitutes."""
    write_video(tmp_path / "a.mp4", np.zeros((4, 48, 64, 3), np.uint8), fps=24)
    (tmp_path / "clips.csv").write_text("path,text\na.mp4,x\n")
    num_bytes, shape = 4 * 3 * 48 * 64, ClipShape(4, 8, 8)

    for limit, expected in ((num_bytes, Clip), (num_bytes - 1, CorruptSample)):
        limits = Limits(clip_bytes=limit)
        dataset = VideoTextDataset(str(tmp_path / "clips.csv"), limits=limits)
        for frames in (None, (0, 4), (0, 2), (2, 4), (3, 4)):
            assert isinstance(dataset[Sample(0, 0, shape, frames)], expected)


def test_every_layout_of_ranks_refuses_clips_of_frames_of_two_sizes(tmp_path: Path) -> None:
    """Also a rank whose part of the clip has frames of one size."""
    mov(tmp_path / "a.mov", *[png(48, 64)] * 4, *[png(24, 32)] * 4)
    (tmp_path / "clips.csv").write_text("path,text\na.mov,x\n")
    dataset = VideoTextDataset(str(tmp_path / "clips.csv"))

    def is_refused(num_frames: int, first: int, stop: int) -> bool:
        sample = dataset[Sample(0, 0, ClipShape(num_frames, 8, 8), (first, stop))]
        return isinstance(sample, CorruptSample) and "its frames differ in size" in sample.reason

    for num_parts in (1, 2, 4, 8):
        size = 8 // num_parts
        parts = [is_refused(8, first, first + size) for first in range(0, 8, size)]
        assert parts == [size * (part + 1) > 4 for part in range(num_parts)]
    # Frames 2 to 5, and 3 and 4.
    assert is_refused(4, 0, 4) and is_refused(2, 1, 2) and not is_refused(2, 0, 1)


def test_only_the_file_itself_is_opened(tmp_path: Path) -> None:
    Image.new("RGB", (64, 48), "red").save(tmp_path / "x000.png")
    Image.new("RGB", (32, 24), "blue").save(tmp_path / "x%03d.png")
    assert read_frames(tmp_path / "x%03d.png").shape == (1, 24, 32, 3)

    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nx000.png\n#EXT-X-ENDLIST\n"
    for text in ("ffconcat version 1.0\nfile x000.png\n", playlist):
        (tmp_path / "list.mp4").write_text(text)
        for reader in READERS:
            with pytest.raises(video.UNREADABLE):
                reader(tmp_path / "list.mp4")


class Endless:
    """A container whose packets and frames never end."""

    def __init__(self) -> None:
        self.frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        codec = SimpleNamespace(name="vp8")
        self.stream = SimpleNamespace(
            height=48, width=64, codec_context=codec, average_rate=24, thread_type=None
        )
        self.streams = SimpleNamespace(video=[self.stream])
        self.num_packets: int | None = None

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *error: object) -> None: ...

    def demux(self, stream: Any) -> Iterator[Any]:
        packet = SimpleNamespace(size=1, is_discard=False, decode=lambda: repeat(self.frame))
        return repeat(packet) if self.num_packets is None else repeat(packet, self.num_packets)


def test_an_endless_stream_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    path = tmp_path / "endless.mp4"
    path.touch()
    monkeypatch.setattr(video.av, "open", lambda *_, **__: endless)

    bounded = Limits(file_frames=1000)
    for read in (
        lambda: count_frames(path, within(bounded)),
        lambda: read_frames(path, bounded),
        lambda: probe(path, bounded),
    ):
        with pytest.raises(ValueError, match=r"1,001 frames; .* 1,000 \(limits.file_frames"):
            read()
    with pytest.raises(TimeoutError, match="took longer than 0.1 s"):
        count_frames(path, Budget.of(0.1, Limits()))

    # Fewer packets than frames: what is decoded is counted as well.
    endless.num_packets = 3
    for limits in (Limits(clip_frames=50), Limits(clip_bytes=50 * 3 * 48 * 64)):
        with pytest.raises(ValueError, match=r"got a file of 51 frames of 48 x 64 pixels.*limits"):
            read_frames(path, limits)
    with pytest.raises(ValueError, match=r"clip_bytes"):
        read_video(path, within(Limits(clip_bytes=50 * 3 * 48 * 64)), num_frames=51)


def test_a_file_system_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(video, "open_regular", lambda path: answer.wait())
    (tmp_path / "clips.csv").write_text("path,text\nx.mp4,x\n")
    dataset = VideoTextDataset(
        str(tmp_path / "clips.csv"), num_frames=2, image_size=(8, 8), time_limit=0.1
    )
    try:
        began = time.monotonic()
        sample = dataset[0]
        assert isinstance(sample, CorruptSample) and "took longer than 0.1 s" in sample.reason
        with pytest.raises(ValueError, match=r"took longer than 0.1 s"):
            read_frames(tmp_path / "x.mp4", Limits(seconds=0.1))
        assert time.monotonic() - began < 30
    finally:
        answer.set()


# Requests.


@pytest.mark.parametrize(
    "options, message",
    [
        (["--num-frames", "1000000000"], "limits.clip_frames"),
        (["--resolution", "100000x100000"], "limits.frame_pixels"),
        (["--resolution", "8192x8192", "--num-frames", "128"], "limits.clip_bytes"),
        (["--num-samples", "1000000000"], "videos to sample of a run; expected at most 100,000"),
        (["--loop", "1000000000"], "frames in all loops of a video; expected at most 65,536"),
        (["--prompt", "x" * 20_001], "20,001 characters of a prompt; expected at most 20,000"),
        (["--reference-path", "a;" * 65], "65 references of a prompt; expected at most 64"),
    ],
)
def test_requests_that_are_too_large(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requests_of(parse([SAMPLE, "--prompt", "a cat", *options]))


def test_a_prompts_own_size_and_its_references_are_bounded(tmp_path: Path) -> None:
    cfg = load_inference_config(SAMPLE)
    (tmp_path / "prompts.csv").write_text("prompt,num_frames\na cat,70000\n")
    with pytest.raises(ValueError, match=r"got the video 0 of the prompts of 70,000 frames"):
        requests_of(cfg, read_prompts(tmp_path / "prompts.csv"))

    (tmp_path / "image.png").write_bytes(png(300, 400))
    cfg = parse([SAMPLE, "--prompt", "a", "--reference-path", str(tmp_path / "image.png")])
    requests = requests_of(cfg)
    check_requests(cfg, requests)
    small = cfg.model_copy(update={"limits": Limits(frame_pixels=119_999)})
    with pytest.raises(ValueError, match=r"got reference .*image.png.*limits.frame_pixels"):
        check_requests(small, requests)


def test_a_large_file_of_prompts_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.touch()
    os.truncate(path, 1 << 30)
    refusal = refusal_within(MEMORY, lambda: read_prompts(path))
    assert "of more than 16,777,216 bytes; expected a prompts file of at most so many" in refusal


def tracked_by_wandb(folder: Path) -> None:
    sys.modules["wandb"] = SimpleNamespace(init=print)
    WandbTracker(folder, {})


def opened_adapters(folder: Path) -> object:
    (folder / "adapter_config.json").touch()
    return open_adapters(str(folder))


# Every small file that a command reads of a run, of weights or of adapters.
SMALL_FILES: dict[str, Callable[[Path], object]] = {
    "COMMIT": verify,
    "manifest.json": lambda folder: (
        (folder / "COMMIT").write_text(f"{FORMAT} 0\n") and verify(folder)
    ),
    "metrics.jsonl": read_metrics,
    "wandb_id": tracked_by_wandb,
    "run.lock": lambda folder: Holder.read(folder / "run.lock"),
    "config.json": saved_config,
    "model.safetensors.index.json": open_weights,
    "adapter_config.json": opened_adapters,
    "cost.json": lambda folder: read_cost_model(folder / "cost.json"),
}


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_of_any_size_takes_no_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 3 << 30)
    message = refusal_within(MEMORY, lambda: SMALL_FILES[name](tmp_path))
    # A lock without its content is none.
    if not message.startswith("nothing: None"):
        assert re.search(r"Error: got .* of more than [\d,]+ bytes; expected", message), message


def test_limits_are_checked_with_the_config() -> None:
    for option, message in [
        ("limits.frame_pixels=0", "greater than or equal to 1"),
        ("limits.frame_pixel=1", "did you mean 'frame_pixels'"),
        ("limits.frame_pixels=100", r"pixels in a frame; expected at most 100 \(limits"),
        ("num_frames=100000", "limits.clip_frames"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_train_config(TRAIN, [option])


# Files in the place of folders, and links in a circle.


@pytest.fixture
def circle(tmp_path: Path) -> Path:
    (tmp_path / "one.mp4").symlink_to("two.mp4")
    (tmp_path / "two.mp4").symlink_to("one.mp4")
    return tmp_path / "one.mp4"


def test_links_in_a_circle(circle: Path) -> None:
    (circle.parent / "clips.csv").write_text(f"path,text\n{circle.name},x\n")
    captions = read_captions(circle.parent / "clips.csv")
    check_captions(captions, [circle], "clips.csv")
    assert "symbolic links" in index_files([circle]).corrupt[0].reason
    assert resolve_inside(circle.parent, circle.name) == circle
    for folder in (circle, circle / "inside"):
        with pytest.raises(ValueError, match="is no folder that can be written"):
            check_writable(folder)
        with pytest.raises(ValueError, match="is no folder that can be written"):
            preflight(parse([SAMPLE, "--prompt", "a", "--outputs", str(folder)]))
