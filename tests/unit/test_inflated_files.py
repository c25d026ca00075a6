"""Small image and video files whose metadata inflates: none takes memory, and pixels stay."""

from __future__ import annotations

import io
import os
import resource
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from opensora_sp.data.media_checks import without_metadata
from opensora_sp.data.video import UNREADABLE, count_frames, probe, read_frames, read_video

INFLATED, MOST = 400 << 20, 300 << 20
SIDE = 8
READERS = [count_frames, probe, read_frames, lambda path: read_video(path, num_frames=1)]


@cache
def bomb() -> bytes:
    """Bytes that inflate to ``INFLATED``."""
    compressor, zeros = zlib.compressobj(1), bytes(1 << 20)
    parts = [compressor.compress(zeros) for _ in range(INFLATED >> 20)]
    return b"".join([*parts, compressor.flush()])


HEADERS = {"iCCP": b"a\0\0", "zTXt": b"a\0\0", "iTXt": b"a\0\1\0\0\0"}


def chunk(name: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + checksum


def bombs(name: str, count: int = 1) -> bytes:
    return chunk(name.encode(), HEADERS[name] + bomb()) * count


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * (1 + 3 * SIDE) * SIDE))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixels + after + chunk(b"IEND", b"")


def apng(before: bytes = b"", between: bytes = b"") -> bytes:
    def control(number: int) -> bytes:
        return chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, SIDE, SIDE, 0, 0, 1, 24, 0, 0))

    pixels = zlib.compress(b"\0" * (1 + 3 * SIDE) * SIDE)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0))
    first = control(0) + chunk(b"IDAT", pixels)
    second = control(1) + chunk(b"fdAT", struct.pack(">I", 2) + pixels) + chunk(b"IEND", b"")
    animation = chunk(b"acTL", struct.pack(">II", 2, 0))
    return b"\x89PNG\r\n\x1a\n" + header + animation + before + first + between + second


def icon(image: bytes) -> bytes:
    entry = struct.pack("<BBBBHHII", SIDE, SIDE, 0, 0, 1, 24, len(image), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + image


def video(suffix: str, *frames: bytes, codec: str = "png", pixels: str = "rgb24") -> bytes:
    """A video whose frames are images."""
    written = io.BytesIO()
    with av.open(written, "w", format=suffix) as container:
        stream = container.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt = SIDE, SIDE, pixels
        for number, frame in enumerate(frames):
            packet = av.Packet(frame)
            packet.stream, packet.time_base = stream, Fraction(1, 24)
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            container.mux(packet)
    return written.getvalue()


def mp4() -> bytes:
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    return written.getvalue()


def box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + name + content


def patched(movie: bytes, name: bytes, offset: int, *numbers: int) -> bytes:
    """An mp4 with other numbers in one of its tables."""
    start = movie.index(name) + offset
    new = struct.pack(f">{len(numbers)}I", *numbers)
    return movie[:start] + new + movie[start + len(new) :]


def exif(entries: int, count: int) -> bytes:
    """A directory whose entries share the bytes of all values."""
    directory = struct.pack("<H", entries)
    for number in range(entries):
        directory += struct.pack("<HHII", 0x9000 + number & 0xFFFF, 3, count, 8)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4 + 2 * count)


EXIF = b"Exif\0\0" + exif(2500, 15_000)[:65_000]


def jpeg(marker: int, content: bytes, count: int) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "red").save(written, "JPEG")
    segment = bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content
    return written.getvalue()[:2] + segment * count + written.getvalue()[2:]


def avif(metadata: bytes) -> bytes:
    """The boxes in which an image has its EXIF."""
    kind = box(b"ftyp", b"avif\0\0\0\0avifmif1")
    entry = box(b"infe", b"\2\0\0\0" + struct.pack(">HH4s", 1, 0, b"Exif") + b"\0")
    items = box(b"iinf", bytes(4) + struct.pack(">H", 1) + entry)
    place = struct.pack(">HHHHHII", 0x4400, 1, 1, 0, 1, 0, len(metadata))
    return kind + box(b"meta", bytes(4) + items + box(b"iloc", bytes(4) + place)) + metadata


def saved(suffix: str, **options: object) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "red").save(written, suffix, **options)
    return written.getvalue()


def crafted() -> dict[str, Callable[[], bytes]]:
    """By name: what writes a hostile file, when its test runs."""
    # Every chunk that inflates, and one of them in every place.
    files: dict[str, Callable[[], bytes]] = {
        **{f"{name}.png": lambda name=name: png(bombs(name)) for name in HEADERS},
        "zTXt thrice.png": lambda: png(bombs("zTXt", 3)),
        "zTXt after.png": lambda: png(after=bombs("zTXt")),
        "zTXt animation.png": lambda: apng(bombs("zTXt")),
        "zTXt between.png": lambda: apng(between=bombs("zTXt")),
        "zTXt named.mp4": lambda: png(bombs("zTXt")),
        "zTXt.ico": lambda: icon(png(bombs("zTXt"))),
        "zTXt first.mov": lambda: video("mov", png(bombs("zTXt")), png()),
        "zTXt second.mov": lambda: video("mov", png(), png(bombs("zTXt"))),
        "zTXt second.avi": lambda: video("avi", png(), png(bombs("zTXt"))),
    }

    def header(before: bytes = b"", *, is_long: bool = False, to_end: bool = False) -> bytes:
        """A box of a movie whose content is compressed."""
        inflating = struct.pack(">I", INFLATED) + bomb()
        compressed = box(b"cmov", box(b"dcom", b"zlib") + box(b"cmvd", inflating))
        start = struct.pack(">I4s", 0 if to_end else len(compressed) + 8, b"moov")
        if is_long:
            start = struct.pack(">I4sQ", 1, b"moov", len(compressed) + 16)
        return before + start + compressed

    kind = box(b"ftyp", b"qt  \0\0\2\0qt  ")
    files |= {
        "header.mov": lambda: header(kind),
        "only header.mov": header,
        "nested header.mov": lambda: kind + box(b"moof", box(b"traf", header()[8:])),
        "long header.mov": lambda: header(kind + box(b"mdat", b"x" * 99), is_long=True),
        "last header.mov": lambda: header(kind, to_end=True),
        "second header.mp4": lambda: header(mp4()),
        "unknown box.mov": lambda: header(box(b"abcd", b"") + kind),
        "frames.mp4": lambda: patched(mp4(), b"stsz", 8, 1, 200_000_000),
        "times.mp4": lambda: patched(mp4(), b"stts", 12, 200_000_000, 1),
        "chunks.mp4": lambda: patched(mp4(), b"stsc", 12, 1, 200_000_000, 1),
        "exif.jpg": lambda: jpeg(0xE1, EXIF, 1),
        "exifs.jpg": lambda: jpeg(0xE1, EXIF, 30),
        "profile.jpg": lambda: jpeg(0xE2, b"ICC_PROFILE\0\1\1" + b"x" * 65_000, 200),
        "comments.jpg": lambda: jpeg(0xFE, b"x" * 65_000, 200),
        "exif adjacent.jpg": lambda: jpeg(0xE1, b"Exif", 1)[:10] + jpeg(0xE1, EXIF, 1)[2:],
        "exif.avi": lambda: video("avi", jpeg(0xE1, EXIF, 1), codec="mjpeg", pixels="yuvj420p"),
        "exif behind bytes.avi": lambda: video(
            "avi", b"RIFF" + jpeg(0xE1, EXIF, 1), codec="mjpeg", pixels="yuvj420p"
        ),
        "exif.mov": lambda: video("mov", jpeg(0xE1, EXIF, 1), codec="mjpeg", pixels="yuvj420p"),
        "exif.png": lambda: png(chunk(b"eXIf", exif(2500, 15_000))),
        "exif.webp": lambda: saved("WEBP", exif=exif(2500, 15_000)),
        "exif.avif": lambda: avif(exif(2500, 15_000)),
        "profile.webp": lambda: saved("WEBP", icc_profile=bomb()),
        "comment.gif": lambda: saved("GIF", comment=bomb()),
    }  # fmt: skip
    return files


FILES = crafted()
# Nothing but metadata is wrong with these.
READABLE = ("iCCP", "zTXt", "iTXt", "exif", "profile", "comment")


def peak_of(function: Callable[[], str]) -> tuple[int, str]:
    """Bytes by which the memory of a forked child grows at most, and what it returns."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = function()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write_end, f"{grown << 10} {report}".encode())
        os._exit(0)

    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        grown, report = pipe.read().split(" ", 1)
    os.waitpid(child, 0)
    return int(grown), report


@pytest.mark.parametrize("name", FILES)
def test_metadata_takes_no_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    assert path.stat().st_size < 16 << 20

    def read() -> str:
        reports = []
        for reader in READERS:
            try:
                reader(path)
                reports.append("read")
            except UNREADABLE as error:
                reports.append(f"{type(error).__name__}: {error}")
        return "; ".join(reports)

    peak, report = peak_of(read)
    assert peak < MOST, report
    if name.startswith(READABLE) and not name.endswith((".avif", ".ico")):
        assert report == "read; read; read; read"
    if name.endswith(".avif"):
        assert "got an image in HEIF or AVIF; expected a format whose metadata" in report
    if "header" in name:
        assert "whose header is compressed (cmov); expected one that is not" in report


def test_pixels_are_what_they_were(tmp_path: Path) -> None:
    """Gray, palette, alpha and 16 bits, turned by EXIF; chunks that inflate change nothing."""
    pixels = np.arange(12 * SIDE * 3, dtype=np.uint8).reshape(12, SIDE, 3)
    color, gray = Image.fromarray(pixels), Image.fromarray(pixels[..., 0])
    images = {
        "color": color,
        "gray": gray,
        "palette": color.quantize(16),
        "alpha": color.convert("RGBA"),
        "16 bit": Image.fromarray(pixels[..., 0].astype(np.uint16) * 257),
    }
    path = tmp_path / "image.png"
    for name, image in images.items():
        image.save(path)
        upright = read_frames(path)
        expected = (
            np.asarray(image.convert("RGB"))
            if name != "16 bit"
            else np.asarray(gray.convert("RGB"))
        )
        assert np.abs(upright[0].astype(int) - expected).max() <= 1, name

        text = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"text"))
        plain = path.read_bytes()
        path.write_bytes(plain[:33] + text + plain[33:])
        assert np.array_equal(read_frames(path), upright), name

        orientation = Image.Exif()
        orientation[0x0112] = 6
        image.save(path, exif=orientation)
        assert np.array_equal(read_frames(path)[0], np.rot90(upright[0], -1)), name


def test_a_chunk_that_ends_early_is_left_as_it_is() -> None:
    whole = png(chunk(b"zTXt", b"a\0\0" + zlib.compress(b"text")))
    for length in range(len(whole)):
        changed = without_metadata(whole[:length])
        assert len(changed) == length and changed.replace(b"skIp", b"zTXt") == whole[:length]
