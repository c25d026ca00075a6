"""``opensora-sp index``: write the manifest of a folder of videos and images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from opensora_sp.common.files import check_writable
from opensora_sp.data.index import (
    check_captions,
    find_files,
    index_files,
    read_captions,
    relative_entries,
)
from opensora_sp.data.limits import Limits
from opensora_sp.data.manifest import check_suffix, write_manifest

MAX_REPORTED = 20  # unreadable files reported by name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("folder", type=Path, help="folder of the files, searched recursively")
    output = "manifest to write: .csv, .jsonl or .parquet"
    add("-o", "--output", type=Path, required=True, help=output)
    captions = (
        "manifest with path,text; by default, and for other files, clip.txt is the caption of "
        "clip.mp4"
    )
    add("--captions", metavar="FILE", help=captions)
    workers = "files probed in parallel (default: one per core)"
    add("--workers", type=int, metavar="N", help=workers)
    pixels = (
        "largest height x width of a frame, limits.frame_pixels in the config; files with larger "
        "ones are skipped (default: 67108864)"
    )
    add("--frame-pixels", type=int, metavar="N", help=pixels)
    return parser


def run(args: argparse.Namespace) -> None:
    check_suffix(args.output)
    for option in ("workers", "frame_pixels"):
        number = getattr(args, option)
        if number is not None and number < 1:
            raise ValueError(
                f"got --{option.replace('_', '-')} {number}; expected at least 1; change it or "
                "leave it out"
            )
    if args.output.is_dir():
        raise ValueError(
            f"got --output {str(args.output)!r}, which is a folder; expected a file to write; "
            "choose another name"
        )
    # Before files are probed, which may take hours.
    check_writable(args.output.parent, "--output in")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    limits = Limits() if args.frame_pixels is None else Limits(frame_pixels=args.frame_pixels)

    captions = read_captions(args.captions) if args.captions else None
    files = find_files(args.folder)
    if captions is not None:
        check_captions(captions, files, args.captions)
    with tqdm(total=len(files), desc="index", unit="file", dynamic_ncols=True, disable=None) as bar:
        index = index_files(
            files, captions=captions, workers=args.workers, on_file=bar.update, limits=limits
        )

    for broken in index.corrupt[:MAX_REPORTED]:
        sys.stderr.write(f"skipped {broken.path}: {broken.reason}\n")
    if not index.entries:
        raise ValueError(
            f"got {len(files)} files in {str(args.folder)!r}, none of which can be read; expected "
            "videos or images; check them"
        )

    write_manifest(args.output, relative_entries(index.entries, args.output))
    without_caption = sum(not entry.text for entry in index.entries)
    sys.stdout.write(
        f"{args.output}: {len(index.entries)} clips, {without_caption} of them without a "
        f"caption; {len(index.corrupt)} files cannot be read and were skipped\n"
    )
