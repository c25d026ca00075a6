"""Write a labelled set of small mp4 files, moving coloured shapes with captions, and its manifest clips.csv."""

import argparse
import csv
from pathlib import Path

from opensora_sp.console import told_errors
from opensora_sp.data import toy_clip, write_video


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; made if it does not exist")
    parser.add_argument("--num", type=int, default=512, help="number of clips (default 512)")
    parser.add_argument("--num-frames", type=int, default=8, help="frames of a clip (default 8)")
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels (default 64)")
    parser.add_argument("--fps", type=float, default=8, help="frames per second (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other clips (default 0)")
    args = parser.parse_args()
    with told_errors():
        if min(args.num, args.num_frames, args.size) < 1:
            raise ValueError("got a number below 1; expected positive numbers; change --num, --num-frames or --size")
    args.folder.mkdir(parents=True, exist_ok=True)
    with (args.folder / "clips.csv").open("w", newline="", encoding="utf-8") as file:
        manifest = csv.writer(file)
        manifest.writerow(["path", "text"])
        for index in range(args.num):
            clip, name = toy_clip(args.seed, index), f"{index:05d}.mp4"
            write_video(args.folder / name, clip.draw(args.num_frames, args.size), fps=args.fps)
            manifest.writerow([name, clip.caption])


if __name__ == "__main__":
    main()
