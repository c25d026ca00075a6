"""Write toy clips, mp4 files of moving coloured shapes, and their manifest clips.csv with captions.

An eighth of all captions is held out, to sample what the model was not trained on.
"""

import argparse
import csv
from itertools import count, islice
from pathlib import Path

from opensora_sp.common.console import report_errors
from opensora_sp.data.toy import is_held_out, toy_clip
from opensora_sp.data.video import write_video


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where to write; made if it does not exist")
    add("--num", type=int, default=512, help="number of clips (default 512)")
    add("--num-frames", type=int, default=8, help="frames of a clip (default 8)")
    add("--size", type=int, default=72, help="height and width in pixels (default 72)")
    add("--seed", type=int, default=0, help="another seed draws other clips (default 0)")
    add("--all-captions", action="store_true", help="include captions that are held out")
    args = parser.parse_args()

    with report_errors():
        if min(args.num, args.num_frames, args.size) < 1:
            raise ValueError(
                "got a number below 1; expected positive numbers; change --num, --num-frames or "
                "--size"
            )

    args.folder.mkdir(parents=True, exist_ok=True)
    with (args.folder / "clips.csv").open("w", newline="", encoding="utf-8") as file:
        manifest = csv.writer(file)
        manifest.writerow(["path", "text"])

        drawn = (toy_clip(args.seed, index) for index in count())
        kept = (clip for clip in drawn if args.all_captions or not is_held_out(clip.caption))
        for number, clip in enumerate(islice(kept, args.num)):
            name = f"{number:05d}.mp4"
            write_video(args.folder / name, clip.draw(args.num_frames, args.size), fps=8)
            manifest.writerow([name, clip.caption])


if __name__ == "__main__":
    main()
