"""``opensora-sp sample``: videos from a checkpoint; ``scripts/inference.py`` is the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from opensora_sp.common.console import add_allow_pickle, config_arguments
from opensora_sp.common.files import shipped_model
from opensora_sp.config import InferenceConfig, load_inference_config
from opensora_sp.runtime.rendezvous import raise_on_all_ranks
from opensora_sp.sampling import read_prompts, sample

# Config keys that an option overrides, with its placeholder. Its help is the key's description.
OPTIONS = {
    "ckpt": "PATH",
    "outputs": "DIR",
    "negative_prompt": "TEXT",
    "num_frames": "N",
    "resolution": "SIZE",
    "aspect_ratio": "H:W",
    **dict.fromkeys(("fps", "seed", "num_samples"), "N"),
    "reference_path": "FILES",
    "mask_strategy": "TEXT",
    **dict.fromkeys(("loop", "sp_size", "scheduler.num_sampling_steps"), "N"),
    **{"scheduler.cfg_scale": "X", "scheduler.guidance_interval": "LOW,HIGH"},
    **{"scheduler.cache_threshold": "X", "scheduler.cache_curve": "FILE"},
}
SCHEDULER_HELP = {
    "scheduler.num_sampling_steps": "sampling steps",
    "scheduler.cfg_scale": "scale of classifier-free guidance; 1 turns it off",
    "scheduler.guidance_interval": "noise levels, 0 (data) to 1 (noise), of steps with guidance",
    "scheduler.cache_threshold": "reuse the blocks' residual up to this estimated relative change; "
    "0 computes all steps",
    "scheduler.cache_curve": "curve of the model, by scripts/fit_cache_curve.py",
}

# Videos of a prompt that VBench looks for.
VBENCH_SAMPLES = 5


def parse(argv: Sequence[str] | None = None) -> InferenceConfig:
    """Parse a command line, by default this process's, into a checked config.

    Raises:
        ValueError: for anything that is missing, unknown or does not fit.
    """
    return config_of(parser().parse_args(argv))


def config_of(arguments: argparse.Namespace) -> InferenceConfig:
    """The checked config of parsed arguments; see ``parse``."""
    args = vars(arguments)
    keys = (*OPTIONS, "format", "skip_existing")
    values = {key: args[key] for key in keys if args[key] is not None}
    if args["lora"]:
        values["lora"] = args["lora"]
    if args["allow_pickle"]:
        values["allow_pickle"] = True

    prompts = [{"prompt": text} for text in args["prompt"]]
    if args["prompts"]:
        prompts += [prompt.model_dump() for prompt in read_prompts(args["prompts"])]
    if args["vbench_prompts"]:
        values |= {"file_names": "prompt", "num_samples": VBENCH_SAMPLES} | values
        # Lists of several dimensions may repeat prompts.
        texts = dict.fromkeys(prompt.prompt for prompt in read_prompts(args["vbench_prompts"]))
        prompts += [{"prompt": text} for text in texts]
    if prompts:
        values["prompts"] = prompts

    config: str | Path = args["config"]
    model = shipped_model(args["config"])
    if model is not None:
        config, values = model / "sample.py", {"ckpt": str(model)} | values
    return load_inference_config(config, args["cfg_options"], values)


def parser() -> argparse.ArgumentParser:
    """The arguments of ``opensora-sp sample``."""
    parser = config_arguments(instead="; or the name of a model of the package: toy")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=".txt file with one prompt per line, or .csv file with a column 'prompt'",
    )

    parser.add_argument(
        "--vbench-prompts",
        metavar="FILE",
        help="a prompt list of VBench: five videos for each prompt (or --num-samples), named as "
        "VBench expects, PROMPT-0.mp4 to PROMPT-4.mp4, in the folder videos of the outputs",
    )

    for key, metavar in OPTIONS.items():
        flag = "--" + key.removeprefix("scheduler.").replace("_", "-")
        description = SCHEDULER_HELP.get(key) or InferenceConfig.model_fields[key].description
        parser.add_argument(flag, dest=key, metavar=metavar, help=description)

    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="PATH[:SCALE]",
        help="LoRA adapters to merge into the weights: a run, a checkpoint, peft's folder or a "
        "name on the hub; repeatable",
    )
    parser.add_argument(
        "--gif", dest="format", action="store_const", const="gif", help="write GIF instead of mp4"
    )
    parser.add_argument(
        "--skip-existing", action="store_const", const=True, help="skip videos that exist already"
    )
    add_allow_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Sample; every rank calls it."""
    with raise_on_all_ranks():
        cfg = config_of(args)
    sample(cfg)
