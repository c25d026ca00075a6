"""Frames against ffmpeg's, manifests and their making, crops, broken files, memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tracemalloc
from itertools import product
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader

from opensora_sp.cli import main
from opensora_sp.common.files import open_regular
from opensora_sp.data import video
from opensora_sp.data.dataset import Clip, ClipShape, CorruptSample, Sample, VideoTextDataset
from opensora_sp.data.index import find_files, sidecar_caption
from opensora_sp.data.manifest import Entry, Manifest, write_manifest
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.transforms import resize_and_crop
from opensora_sp.data.video import count_frames, read_frames, read_video, write_video

WRITTEN = {  # format, codec, pixels and frames of a file
    "a.gif": ("gif", "gif", "rgb8", 3),
    "a.jpeg": ("image2", "mjpeg", "yuvj420p", 1),
    "a.jpg": ("image2", "mjpeg", "yuvj420p", 1),
    "a.mjpeg": ("mjpeg", "mjpeg", "yuvj420p", 3),
    "a.png": ("image2", "png", "rgb24", 1),
    "animated.png": ("apng", "apng", "rgb24", 3),
    "a.webp": ("image2", "libwebp", "yuv420p", 1),
    "a.avi": ("avi", "mpeg4", "yuv420p", 3),
    "a.m4v": ("mp4", "mpeg4", "yuv420p", 3),
    "stream.m4v": ("m4v", "mpeg4", "yuv420p", 3),
    "a.mkv": ("matroska", "mpeg4", "yuv420p", 3),
    "a.mov": ("mov", "mpeg4", "yuv420p", 3),
    "animated.mov": ("apng", "apng", "rgb24", 3),
    "a.mp4": ("mp4", "libx264", "yuv420p", 3),
    "stream.mp4": ("h264", "libx264", "yuv420p", 3),
    "a.webm": ("webm", "libvpx-vp9", "yuv420p", 3),
    "a.ivf": ("ivf", "libvpx-vp9", "yuv420p", 3),
    "a.m2v": ("mpeg2video", "mpeg2video", "yuv420p", 3),
    "a.mxf": ("mxf", "mpeg2video", "yuv420p", 3),
    "a.nut": ("nut", "mpeg4", "yuv420p", 3),
    "a.y4m": ("yuv4mpegpipe", "wrapped_avframe", "yuv420p", 3),
    "a.ppm": ("image2", "ppm", "rgb24", 1),
    "a.pgm": ("image2", "pgm", "gray", 1),
    "a.jp2": ("image2", "jpeg2000", "rgb24", 1),
}
NUM_FRAMES = 60
LENGTH = (NUM_FRAMES - 0.5) * 1001 / 30000
# No two frames are alike.
NOISY = f"testsrc2=size=64x48:rate=30000/1001:duration={LENGTH},noise=alls=60:allf=t"
SOURCE = ("-f", "lavfi", "-i", NOISY)
X264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "4", "-pix_fmt", "yuv420p")
REALTIME = ("-deadline", "realtime", "-cpu-used", "8")
# Packets that show nothing.
NOT_SHOWN = ("-auto-alt-ref", "1", "-lag-in-frames", "16")
FILES = {  # name: how ffmpeg makes it of {b}, a file with B-frames
    "open_gop.mkv": (*X264, "-bf", "3", "-g", "12", "-x264-params", "open-gop=1"),
    "turned.mp4": ("-c", "copy"),
    "cut.mp4": ("-c", "copy"),  # an edit list hides what lies between a key frame and the cut
    "uneven.mp4": ("-vf", "select='not(eq(mod(n,5),3))'", "-fps_mode", "vfr", *X264),
    "vp9.webm": ("-c:v", "libvpx-vp9", *REALTIME, "-crf", "4", "-b:v", "0"),
    "vp8.webm": ("-c:v", "libvpx", "-crf", "4", "-b:v", "9M", *NOT_SHOWN),
    "stream.mp4": ("-c", "copy", "-f", "mpegts"),  # named so by many a downloader
    "pictures.mov": ("-c:v", "mjpeg", "-q:v", "2", "-pix_fmt", "yuvj420p"),
    "moving.gif": (),
    "one.png": ("-frames:v", "1"),
    "one.jpg": ("-frames:v", "1"),
}
BEFORE = {"turned.mp4": ("-display_rotation", "90"), "cut.mp4": ("-ss", "0.5")}


def ffmpeg(*arguments: str | Path) -> bytes:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    ffmpeg(*SOURCE, *X264, "-bf", "3", "-g", "12", folder / "b.mp4")
    for name, options in FILES.items():
        ffmpeg(*BEFORE.get(name, ()), "-i", folder / "b.mp4", *options, folder / name)
    return folder


def reference(path: Path, height: int, width: int) -> np.ndarray:
    """All frames as ffmpeg shows them."""
    raw = ffmpeg("-i", path, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize("name", ["b.mp4", *FILES])
def test_frames_are_those_of_ffmpeg(videos: Path, name: str) -> None:
    height, width = (64, 48) if name == "turned.mp4" else (48, 64)
    wanted = reference(videos / name, height, width)
    assert count_frames(videos / name) == len(wanted)
    assert len(wanted) == {"one.png": 1, "one.jpg": 1, "cut.mp4": 45, "uneven.mp4": 48}.get(
        name, NUM_FRAMES
    )

    asked = [(0, 1, 1), (0, 5, 3), (7, 4, 1), (26, 3, 2), (33, 6, 2), (len(wanted) - 3, 3, 1)]
    for start, count, interval in asked if len(wanted) > 1 else asked[:1]:
        frames, _ = read_video(videos / name, num_frames=count, interval=interval, start=start)
        assert frames.shape == (count, height, width, 3)
        for place, frame in zip(range(start, len(wanted), interval), frames):
            apart = np.abs(wanted.astype(np.int16) - frame).mean(axis=(1, 2, 3))
            assert apart.argmin() == place and apart[place] < 1, (start, count, interval, place)

    with pytest.raises(ValueError, match=rf"got {len(wanted)} frames; expected at least"):
        read_video(videos / name, num_frames=2, start=len(wanted) - 1)
    assert np.array_equal(
        read_frames(videos / name)[-1],
        read_video(videos / name, num_frames=1, start=len(wanted) - 1)[0][0],
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_files_of_common_formats_are_read(tmp_path: Path, name: str) -> None:
    format, codec, pixels, num_frames = WRITTEN[name]
    with av.open(str(tmp_path / name), "w", format=format) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 64, pixels
        for number in range(num_frames):
            picture = np.full((48, 64, 3), 80 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())

    assert count_frames(tmp_path / name) == num_frames
    assert read_video(tmp_path / name, num_frames=num_frames)[0].shape == (num_frames, 48, 64, 3)


def test_all_suffixes_of_an_index_are_read() -> None:
    suffixes = {Path(name).suffix for name in WRITTEN}
    assert suffixes >= {*video.IMAGE_SUFFIXES, *video.VIDEO_SUFFIXES}


def test_a_frame_that_is_lost_is_not_made_up_for_by_a_later_one(
    videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = video._frames_from
    monkeypatch.setattr(
        video, "_frames_from", lambda *of: (found for found in decoded(*of) if found[0] != 33)
    )
    for start in (31, 33):
        with pytest.raises(ValueError, match=rf"1 of its frames {start} to {start + 2} cannot be"):
            read_video(videos / "b.mp4", num_frames=2, start=start, interval=2)
    assert len(read_video(videos / "b.mp4", num_frames=2, start=32, interval=2)[0]) == 2


def test_a_reference_of_frames_of_two_sizes_is_refused(tmp_path: Path) -> None:
    for size in ("64x48", "32x48"):
        ffmpeg(
            "-f", "lavfi", "-i", f"testsrc=size={size}:duration=0.2", *X264, tmp_path / f"{size}.ts"
        )
    (tmp_path / "both.mp4").write_bytes(
        b"".join((tmp_path / f"{size}.ts").read_bytes() for size in ("64x48", "32x48"))
    )
    with pytest.raises(ValueError, match=r"got '.*both.mp4', which cannot be decoded .*; expected"):
        read_frames(tmp_path / "both.mp4")


def test_a_folder_becomes_a_manifest(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.mp4", "turned.mp4", "one.png"):
        (folder / "sub" / name).write_bytes((videos / name).read_bytes())
    (folder / "broken.mp4").write_bytes(b"no video")
    (folder / "empty.webm").touch()
    (folder / "page.mp4").write_text("<html>404</html>")
    (folder / "cut.mp4").write_bytes((videos / "b.mp4").read_bytes()[:9000])
    (folder / "sub" / "b.txt").write_text("a fox,\n running\n", encoding="utf-8-sig")
    (folder / "captions.csv").write_text("path,text\nsub/one.png,a still\n")

    for ending in ("csv", "jsonl", "parquet"):
        target = tmp_path / "out" / f"clips.{ending}"
        captions = ["--captions", str(folder / "captions.csv"), "--workers", "2"]
        main(["index", str(folder), "-o", str(target), *captions])
        reported = capsys.readouterr()
        assert "3 clips, 1 of them without a caption; 4 files cannot be read" in reported.out
        assert "\r" not in reported.err
        lines = reported.err.splitlines()
        for name, reason in [
            ("broken.mp4", "is text"),
            ("empty.webm", "the file is empty"),
            ("page.mp4", "is text, such as the error page"),
            ("cut.mp4", "damaged or incomplete"),
        ]:
            assert any(name in line and reason in line for line in lines), (name, reported.err)
        video, image, turned = Manifest(target)
        assert video.path.resolve() == folder / "sub" / "b.mp4" and video.text == "a fox, running"
        assert video[2:] == (60, 48, 64, pytest.approx(30000 / 1001), 0.75)
        assert image[1:] == ("a still", 1, 48, 64, None, 0.75)
        assert turned[2:5] == (60, 64, 48) and turned.text == ""

    (tmp_path / "others.csv").write_text("path,text\nsub/one.png,a still\ngone.mp4,a fox\n")
    for arguments, message in [
        ((str(tmp_path / "none"),), "which is no folder"),
        ((str(folder / "captions.csv"),), "which is no folder; expected files"),
        ((str(tmp_path / "out"),), "has no videos and images"),
        ((str(folder), "--workers", "0"), "got --workers 0"),
        (
            (str(folder), "--captions", str(tmp_path / "others.csv")),
            "with 2 captions, none of which is of one of",
        ),
    ]:
        with pytest.raises(SystemExit):
            main(["index", *arguments, "-o", str(tmp_path / "clips.csv")])
        assert message in capsys.readouterr().err


def test_a_caption_of_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("in\nKöln\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"of which line 2 is not UTF-8; expected"):
        sidecar_caption(tmp_path / "a.mp4")


def test_an_index_looks_at_each_file_once_and_not_at_hidden_folders(
    videos: Path, tmp_path: Path
) -> None:
    (tmp_path / "set" / ".trash").mkdir(parents=True)
    for name in ("a.png", ".trash/b.png"):
        (tmp_path / "set" / name).write_bytes((videos / "one.png").read_bytes())
    (tmp_path / "set" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "c.png").write_bytes((videos / "one.png").read_bytes())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "far")
    assert find_files(tmp_path / "set") == [
        tmp_path / "set" / "a.png",
        tmp_path / "set" / "link" / "c.png",
    ]


def test_an_index_is_written_whole_or_not_at_all(
    videos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, target = tmp_path / "set", tmp_path / "clips.csv"
    folder.mkdir()
    for name in (b"good.png", b"caf\xe9.png"):  # as an archive of another system is unpacked
        (folder / os.fsdecode(name)).write_bytes((videos / "one.png").read_bytes())
    main(["index", str(folder), "-o", str(target)])
    reported = capsys.readouterr()

    assert "1 clips, 1 of them without a caption; 1 files cannot be read" in reported.out
    assert f"skipped {folder}/caf\\xe9.png: its name is not UTF-8" in reported.err
    before = target.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        write_manifest(target, [Entry(Path("a.png"), "b"), Entry(Path("c.png"), "\ud800")])
    assert target.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {
        "set",
        "clips.csv",
    }

    monkeypatch.setattr(
        "opensora_sp.cli.index_clips.index_files",
        lambda *_, **__: pytest.fail("looked at files first"),
    )
    for name, message in [
        ("set.csv", f"--output '{tmp_path / 'set.csv'}', which is a folder"),
        ("clips.csv/a.csv", f"--output in '{target}', but {target} is no folder"),
    ]:
        (tmp_path / "set.csv").mkdir(exist_ok=True)
        with pytest.raises(SystemExit):
            main(["index", str(folder), "-o", str(tmp_path / name)])
        assert f"got {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("clips.csv", "path,text,height\na.mp4,b,tall\n", "got height 'tall' for clip 1 of"),
        ("clips.csv", "path,text,num_frames\na.mp4,b,inf\n", "got num_frames 'inf' for clip 1"),
        ("clips.csv", "path,text,width\na.mp4,b,1\na.mp4,b,-4\n", "got width '-4' for clip 2"),
        ("clips.jsonl", '{"path": "a", "text": "b", "height": 1.5}\n', "got height 1.5 for clip 1"),
        ("clips.csv", "path,text\na.mp4,b\n,c\n", "without path for clip 2; expected a file"),
        ("clips.jsonl", '{"path": "a", "text": "b"}\n{"text": "c"}\n', "without path for clip 2"),
        ("clips.csv", "path,text,path\na,b,c\n", "with two columns 'path'; expected each once"),
        (
            "clips.jsonl",
            '{"path": "a", "text": "b", "path": "c"}\n',
            "got the line .* expected a JSON object with each name once",
        ),
        ("clips.jsonl", '{"path": {"a": 1}, "text": "b"}\n', "got path .* for clip 1 .*expected"),
        ("clips.jsonl", '{"path": "a", "text": ["b"]}\n', "got text .* for clip 1 .*expected text"),
        ("clips.csv", "path,text\na.mp4," + "x" * 140_000, "cannot be read .*field limit.*at most"),
        ("clips.csv", "path,text\na.mp4,b\nb.mp4,K\udcf6ln\n", "of which line 3 is not UTF-8"),
        ("clips.jsonl", '{"path": "a.mp4", "text": "K\udcf6ln"}\n', "of which line 1 is not UTF-8"),
        ("clips.jsonl", '{"path": "a.mp4"}\n', "expected path and text; add text, in CSV to its"),
        ("clips.jsonl", "path,text\n", "got the line 'path,text' in .*expected a JSON object"),
        ("clips.csv", None, "which is not a file; expected a CSV, JSONL or Parquet file with"),
        ("clips.csv", "path,text\n", "without clips; expected at least one line"),
        ("clips.csv", "file,text\na.mp4,b\n", r"with the columns \['file', 'text'\]; expected"),
        ("clips.csv", "", "expected path and text"),
        # An empty cell at the end is none: spreadsheets write such.
        (
            "clips.csv",
            "path,text\na.mp4,a fox,\nb.mp4,a fox, running\n",
            r"got line 3 of '.*' with 3 cells, the last ' running'; expected the 2 of the header",
        ),
        ("clips.parquet", "path,text\n", "cannot be read .*expected Parquet"),
        ("clips.txt", "path,text\n", "expected a .csv, .jsonl or .parquet file"),
        ("clips.csv", "path,text\n" + "," * 2_000_000, "a line of more than 1,048,576 characters"),
        ("clips.jsonl", "[" * 2_000_000, "a line of more than 1,048,576 characters"),
        ("clips.csv", "path,text" + ",a" * 2000 + "\nb,c\n", "with 2,002 columns; expected at"),
    ],
)
def test_what_is_no_manifest_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as error:
        Manifest(tmp_path / name)
    assert str(error.value).startswith("got ")


def test_columns_that_are_not_used_take_no_memory(tmp_path: Path) -> None:
    wide = {f"column {number}": 1 for number in range(10_000)}
    rows = [{"path": "a.mp4", "text": "b", **wide}, {"path": "b.mp4", "text": "c", "height": 48}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tracemalloc.start()
    found = Manifest(tmp_path / "a.jsonl")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Python keeps up to 2,000 freed pairs for the next ones.
    assert [entry.height for entry in found] == [None, 48] and kept < 200_000


def test_parquet_of_one_clip_many_times_is_refused(tmp_path: Path) -> None:
    paths = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000_000), ["a.mp4"])
    parquet.write_table(pyarrow.table({"path": paths, "text": paths}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="which lists 1,000,000 clips; expected other paths"):
        Manifest(tmp_path / "a.parquet")


def shared(cell: str, count: int) -> pyarrow.Array:
    """One cell of so many rows, which a Parquet file holds once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [cell])


@pytest.mark.parametrize("content", ["cell", "rows", "list", "struct"])
def test_small_parquet_files_do_not_fill_memory(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows with a cell of 100 MB, 4,000 rows with one of 500 kB, and nested cells."""
    texts = {
        "cell": lambda: shared("x" * (100 << 20), 8),
        "rows": lambda: shared("x" * 500_000, 4000),
        "list": lambda: pyarrow.array([["x"] * 100] * 8),
        "struct": lambda: pyarrow.array([{"a": "x"}] * 8),
    }[content]()
    paths = [f"{clip}.mp4" for clip in range(len(texts))]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"path": paths, "text": texts}), path, compression="zstd")
    assert path.stat().st_size < 50_000

    tables = []
    read = parquet.ParquetFile.read

    def kept_read(*arguments: object) -> pyarrow.Table:
        tables.append(read(*arguments))
        return tables[-1]

    monkeypatch.setattr(parquet.ParquetFile, "read", kept_read)
    nested = content in ("list", "struct")
    message = "expected text or numbers" if nested else "of cells; expected at most 67,108,864"
    with pytest.raises(ValueError, match=message):
        Manifest(path)
    assert len(tables) == (content == "rows")
    assert all(table.nbytes < 4 << 20 for table in tables)


def test_parquet_of_any_plain_types_is_read(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "path": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
            "text": pyarrow.array(["x", None, "y"], pyarrow.large_string()),
            "fps": pyarrow.nulls(3),
            "height": pyarrow.array([1, 2, None], pyarrow.int16()),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    rows = [("a", "x", None, 1), ("b", "", None, 2), ("a", "y", None, None)]
    assert [
        (row.path.name, row.text, row.fps, row.height) for row in Manifest(tmp_path / "a.parquet")
    ] == rows

    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["path", "text", "path"])
    parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="with two columns 'path'"):
        Manifest(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", "path,text\r\na.mp4,b\r\n"), ("a.jsonl", '{"path":"a.mp4","text":"b"}\r\n')],
)
def test_manifests_of_windows_are_read(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode("utf-8-sig"))
    assert list(Manifest(tmp_path / name)) == [Entry(tmp_path / "a.mp4", "b")]


def test_manifests_may_leave_numbers_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'text,path,fps,height\n"one, two",sub/a.mp4,,48\nb,/b.mp4,29.97,\n'
    )
    (tmp_path / "a.jsonl").write_text(
        '{"path": "sub/a.mp4", "text": "one, two", "height": 48}\n'
        '{"text": "b", "path": "/b.mp4", "fps": 29.97}\n'
    )
    for manifest in (Manifest(tmp_path / "a.csv"), Manifest(tmp_path / "a.jsonl")):
        assert list(manifest) == [
            Entry(tmp_path / "sub" / "a.mp4", "one, two", height=48),
            Entry(Path("/b.mp4"), "b", fps=29.97),
        ]
        assert np.isnan(manifest.column("width")).all()


def test_crops_lie_where_they_are_put() -> None:
    frames = np.zeros((2, 20, 60, 3), dtype=np.uint8)
    frames[..., 0] = np.arange(60, dtype=np.uint8) * 4
    for place, left in [(None, 20), ((0.0, 0.0), 0), ((0.0, 0.999), 40), ((0.5, 0.5), 20)]:
        cropped = resize_and_crop(frames, (20, 20), place)
        assert cropped.shape == (3, 2, 20, 20) and cropped[0, 0, 0, 0] == left * 4
    assert resize_and_crop(frames, (40, 40)).float()[0].mean() == pytest.approx(
        frames[:, :, 20:40, 0].mean(), abs=1
    )


def test_what_is_random_depends_on_seed_epoch_and_clip_alone(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", toy_clip(0, 0).draw(30, 64), fps=8)
    (tmp_path / "clips.csv").write_text("path,text\na.mp4,x\na.mp4,x\n")
    shape = ClipShape(3, 16, 24)
    samples = [Sample(clip, epoch, shape) for epoch, clip in product(range(3), range(2))]
    options = dict(transform="resize_random_crop", clip_start="random")

    def clips(seed: int, order: list[Sample], workers: int) -> dict[Sample, torch.Tensor]:
        dataset = VideoTextDataset(str(tmp_path / "clips.csv"), seed=seed, **options)
        loader = DataLoader(
            dataset,
            batch_sampler=[[sample] for sample in order],
            collate_fn=list,
            num_workers=workers,
        )
        return {sample: item.video.clone() for sample, (item,) in zip(order, loader)}

    here, there = clips(1, samples, 0), clips(1, samples[::-1], 2)
    assert all(torch.equal(here[sample], there[sample]) for sample in samples)
    assert len({one.numpy().tobytes() for one in here.values()}) == len(samples)
    assert not torch.equal(clips(2, samples, 0)[samples[0]], here[samples[0]])
    with pytest.raises(ValueError, match="got cache=True with transform 'resize_random_crop'"):
        VideoTextDataset(str(tmp_path / "clips.csv"), cache=True, **options)


def test_files_that_cannot_be_used_come_with_the_reason(tmp_path: Path) -> None:
    write_video(tmp_path / "good.mp4", toy_clip(0, 0).draw(6, 32), fps=8)
    whole = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.png").write_text("no image")
    # No decoder has this name.
    (tmp_path / "unknown.mp4").write_bytes(whole.replace(b"avc1", b"none"))
    ffmpeg("-f", "lavfi", "-i", "sine=duration=0.1", tmp_path / "sound.mp4")
    names = ["good.mp4", "half.mp4", "empty.mp4", "text.png", "gone.mp4"]
    names += ["unknown.mp4", "sound.mp4"]
    (tmp_path / "clips.csv").write_text("path,text\n" + "".join(f"{name},x\n" for name in names))
    dataset = VideoTextDataset(str(tmp_path / "clips.csv"), num_frames=5, image_size=(16, 16))

    assert isinstance(dataset[0], Clip)
    for number, name in enumerate(names[1:], 1):
        broken = dataset[number]
        assert isinstance(broken, CorruptSample) and broken.path.endswith(name)
        assert re.match(r"\w+: .+", broken.reason)
        if name in ("unknown.mp4", "sound.mp4"):
            assert "it holds no video that can be decoded" in broken.reason

    long = VideoTextDataset(str(tmp_path / "clips.csv"), num_frames=7, image_size=(16, 16))
    assert "got 6 frames; expected at least 7" in long[0].reason
    slow = VideoTextDataset(
        str(tmp_path / "clips.csv"), num_frames=5, image_size=(16, 16), time_limit=1e-9
    )
    assert isinstance(slow[0], CorruptSample)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A named pipe without a writer would hold its reader for ever."""
    os.mkfifo(tmp_path / "pipe.mp4")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.mp4").symlink_to("/dev/zero")
    (tmp_path / "folder.mp4").mkdir()
    names = ["pipe.mp4", "pipe.png", "device.mp4", "folder.mp4"]
    (tmp_path / "clips.csv").write_text("path,text\n" + "".join(f"{name},x\n" for name in names))
    dataset = VideoTextDataset(str(tmp_path / "clips.csv"), num_frames=5, image_size=(16, 16))

    for number, name in enumerate(names):
        sample = dataset[number]
        assert isinstance(sample, CorruptSample)
        assert "a named pipe, a device or a folder, not a file" in sample.reason
        with pytest.raises(ValueError, match="not a file"):
            read_frames(tmp_path / name)

    os.mkfifo(tmp_path / "clips.jsonl")
    with pytest.raises(ValueError, match="which is not a file"):
        Manifest(tmp_path / "clips.jsonl")
    with pytest.raises(OSError, match=r"not a file: '.*clips\.jsonl'"):
        open_regular(tmp_path / "clips.jsonl", "r", encoding="utf-8")
    with open_regular(tmp_path / "clips.csv", "r", encoding="utf-8") as file:
        assert file.readline() == "path,text\n" and os.get_blocking(file.fileno())
