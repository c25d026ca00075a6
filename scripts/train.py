"""Train an STDiT model from a config.

torchrun --nproc_per_node 8 scripts/train.py configs/stdit3/train/64x512x512_sp8.py
colossalai run --nproc_per_node 8 --hostfile hosts scripts/train.py CONFIG
"""

import argparse

from opensora_sp.console import (
    add_allow_pickle,
    config_arguments,
    exit_on_interrupt,
    log_to_terminal,
    parse_bool,
    report_errors,
)
from opensora_sp.launchers import end_with_launchers


def parser() -> argparse.ArgumentParser:
    parser = config_arguments("Train an STDiT model. Start it with torchrun or colossalai run.")
    parser.add_argument(
        "--resume",
        metavar="auto|none|PATH",
        help="resume from the newest checkpoint in the run's folder, or from a given one; none "
        "starts from step 0 in a folder of checkpoints that cannot be resumed",
    )
    parser.add_argument(
        "--accept-new-data",
        action="store_true",
        help="resume also if the manifest is not the one that the checkpoint was written with",
    )
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        help="write a trace of a step (3) or of several (10-12) into the run's folder",
    )
    parser.add_argument(
        "--wandb",
        type=parse_bool,
        nargs="?",
        const=True,
        metavar="True|False",
        help="log to W&B or not",
    )

    add_allow_pickle(parser)
    return parser


def main() -> None:
    end_with_launchers()
    exit_on_interrupt()
    args = parser().parse_args()
    log_to_terminal()

    from opensora_sp.config import load_train_config
    from opensora_sp.runtime import raise_on_all_ranks
    from opensora_sp.training import train

    with report_errors():
        with raise_on_all_ranks():
            wandb = [] if args.wandb is None else [f"wandb={args.wandb}"]
            cfg = load_train_config(args.config, [*args.cfg_options, *wandb])
        if args.allow_pickle:
            cfg = cfg.model_copy(update={"allow_pickle": True})
        train(
            cfg,
            resume=args.resume,
            profile=args.profile,
            accept_new_data=args.accept_new_data,
        )


if __name__ == "__main__":
    main()
