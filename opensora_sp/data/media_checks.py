"""Media files before a decoder reads them: metadata of which it would make far more than its bytes.

A QuickTime header may be compressed; such files are refused. In images, FFmpeg inflates text and
profiles of a PNG whatever their size is then, and reads every entry of EXIF, though thousands of
them may share the same bytes. Nothing but the orientation changes pixels. All positions stay: names
of chunks are overwritten, and the entries of EXIF.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import IO

from opensora_sp.common.files import open_regular

from .limits import Budget

PNG, JPEG = b"\x89PNG", b"\xff\xd8"
MNG = b"\x8aMNG"
INFLATED_CHUNKS = (b"iCCP", b"zTXt", b"iTXt")
# A chunk that decoders do not know.
SKIPPED = b"skIp"
# A segment APP1, wherever it is, and another that has no meaning.
JPEG_EXIF = re.compile(rb"\xff\xe1(?=..Exif..)", re.DOTALL)
JPEG_SKIPPED = b"\xff\xe9"
ORIENTATION = 0x0112
# The first box of a QuickTime file, and boxes of which FFmpeg reads no content.
FIRST_BOXES = set(b"ftyp moov mdat free skip wide pnot styp moof sidx uuid udta junk".split())
CONTENT_BOXES = (b"mdat", b"free", b"skip")
# What FFmpeg reads there, and the two tables of a HEIF image. Tables of samples may have the bytes
# of one name by chance.
COMPRESSED_HEADER = re.compile(rb"cmov....dcom", re.DOTALL)
HEIF_TABLES = re.compile(rb"iinf|iloc")
PART_BYTES = 1 << 20


def without_metadata(image: bytes) -> bytes:
    """A PNG, JPEG or WebP of the same length; also chunks of an animated PNG."""
    changed = bytearray(image)
    # Decoders find the segments of a JPEG behind any bytes.
    for match in JPEG_EXIF.finditer(image):
        if not _keep_orientation(changed, match.end() + 8):
            changed[match.start() : match.end()] = JPEG_SKIPPED

    if image.startswith(b"RIFF"):
        _change_chunks(changed, 12, is_riff=True)
    elif not image.startswith(JPEG):
        _change_chunks(changed, 8 if image.startswith((PNG, MNG)) else 0, is_riff=False)
    return bytes(changed)


def _change_chunks(image: bytearray, position: int, *, is_riff: bool) -> None:
    """Change the chunks from a position on: name and length in RIFF, length and name in a PNG."""
    order, name_at = ("<I", 0) if is_riff else (">I", 4)
    while position + 8 <= len(image):
        name = position + name_at
        kind = bytes(image[name : name + 4])
        (length,) = struct.unpack_from(order, image, position + 4 - name_at)

        is_exif = kind in (b"eXIf", b"EXIF")
        if kind in INFLATED_CHUNKS or (is_exif and not _keep_orientation(image, position + 8)):
            image[name : name + 4] = SKIPPED
        # Chunks of a PNG end in a checksum, chunks of RIFF on an even byte.
        position += 8 + length + (length % 2 if is_riff else 4)


def _keep_orientation(image: bytearray, start: int) -> bool:
    """Remove all entries but the orientation from EXIF; False where there are none to be read."""
    if image[start : start + 6] == b"Exif\0\0":
        start += 6
    order = ">" if image[start : start + 2] == b"MM" else "<"
    try:
        (offset,) = struct.unpack_from(f"{order}I", image, start + 4)
        table = start + offset + 2
        (count,) = struct.unpack_from(f"{order}H", image, table - 2)
        kept = b""
        for entry in range(table, table + 12 * count, 12):
            (tag,) = struct.unpack_from(f"{order}H", image, entry)
            if tag == ORIENTATION and not kept:
                kept = bytes(image[entry : entry + 12])
    except struct.error:
        return False

    if len(kept) < 12:
        return False
    struct.pack_into(f"{order}H", image, table - 2, 1)
    # Without a further directory.
    image[table : table + 16] = kept + bytes(len(image[table + 12 : table + 16]))
    return True


def why_invalid(path: str | Path) -> str:
    """The reason why an empty file or a text is no video; "" for other files."""
    with open_regular(path) as file:
        start = file.read(256)
    if not start:
        return "the file is empty"
    if start.isascii() and b"\0" not in start:
        return "the file is text, such as the error page of a download, not a video or image"
    return ""


def check_boxes(file: IO[bytes], end: int, budget: Budget) -> None:
    """Raise ValueError if a QuickTime file has a compressed header, which FFmpeg inflates, or is an
    image (HEIF, AVIF), of which it reads EXIF.
    """
    position = 0
    while position + 8 <= end:
        budget.check_time()
        file.seek(position)
        size, kind = struct.unpack(">I4s", file.read(8))
        if size == 1:
            size = int.from_bytes(file.read(8))
        elif size == 0:
            size = end - position

        last, names = b"", set[bytes]()
        stop = position if kind in CONTENT_BOXES else min(position + size, end)
        while file.tell() < stop and (part := file.read(min(PART_BYTES, stop - file.tell()))):
            budget.check_time()
            names.update(HEIF_TABLES.findall(last + part))
            if COMPRESSED_HEADER.search(last + part):
                raise ValueError(
                    "got a video whose header is compressed (cmov); expected one that is not; "
                    "write it again with ffmpeg -c copy"
                )
            if len(names) == 2:
                raise ValueError(
                    "got an image in HEIF or AVIF; expected a format whose metadata is bounded; "
                    "convert it to PNG or JPEG"
                )
            last = part[-11:]
        position += max(size, 8)
