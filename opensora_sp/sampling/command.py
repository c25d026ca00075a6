"""The command line of ``scripts/inference.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opensora_sp.config import InferenceConfig, load_inference_config
from opensora_sp.console import add_allow_pickle, config_arguments

from .prompts import read_prompts

OPTIONS = {  # what they override in the config, and what they are
    "ckpt": ("PATH", "weights: a run's folder, a checkpoint, a Hugging Face folder, a file, ..."),
    "outputs": ("DIR", "where to write"),
    "negative_prompt": ("TEXT", "what guidance moves away from, instead of no caption"),
    "num_frames": ("N", "frames of a video, 1 for an image, or a name such as 2s or 4s"),
    "resolution": ("SIZE", "HEIGHTxWIDTH, or with --aspect-ratio a name such as 240p"),
    "aspect_ratio": ("H:W", "such as 9:16, with a named --resolution"),
    "fps": ("N", "frames per second"),
    "seed": ("N", "of the noise"),
    "num_samples": ("N", "videos for each prompt"),
    "reference_path": ("FILES", "images and videos that are given, separated by ;"),
    "mask_strategy": (
        "TEXT",
        "where their frames go: loop,reference,its frame,frame of the video,length,edit;...",
    ),
    "loop": ("N", "parts of the video, each going on from the end of the one before"),
    "sp_size": ("N", "processes that share a batch; by default the fastest by an estimate"),
    "scheduler.num_sampling_steps": ("N", "steps from noise to video"),
    "scheduler.cfg_scale": ("X", "guidance; 1 turns it off"),
}


def parse(argv: Sequence[str] | None = None) -> InferenceConfig:
    """The checked config that a command line asks for, by default that of this process.

    Raises:
        ValueError: for anything that is missing, unknown or does not fit.
    """
    args = vars(parser().parse_args(argv))
    values = {
        key: args[key] for key in (*OPTIONS, "format", "skip_existing") if args[key] is not None
    }
    if args["allow_pickle"]:
        values["allow_pickle"] = True
    prompts = [{"prompt": text} for text in args["prompt"]]
    if args["prompts"]:
        prompts += [one.model_dump() for one in read_prompts(args["prompts"])]
    if prompts:
        values["prompts"] = prompts
    return load_inference_config(args["config"], args["cfg_options"], values)


def parser() -> argparse.ArgumentParser:
    """The arguments of ``scripts/inference.py``."""
    parser = config_arguments(
        "Sample videos or images: a file, a contact sheet and a JSON for each."
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=".txt with a prompt a line, or .csv with a column 'prompt'",
    )
    for key, (metavar, description) in OPTIONS.items():
        flag = "--" + key.removeprefix("scheduler.").replace("_", "-")
        parser.add_argument(flag, dest=key, metavar=metavar, help=description)
    parser.add_argument(
        "--gif", dest="format", action="store_const", const="gif", help="write GIF instead of mp4"
    )
    parser.add_argument(
        "--skip-existing",
        action="store_const",
        const=True,
        help="leave out videos that are there already",
    )
    add_allow_pickle(parser)
    return parser
