"""Precompute latents and text features of a config's clips, for training with CachedFeatures.

torchrun --nproc_per_node 8 scripts/precompute.py configs/stdit3/train/16x256x256_sp2.py -o cache/
"""

from opensora_sp.console import (
    config_arguments,
    interrupts_end_at_once,
    log_to_terminal,
    told_errors,
)


def main() -> None:
    interrupts_end_at_once()
    parser = config_arguments(
        "Write a feature cache. Start with torchrun; an interrupted run resumes when started again."
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="folder of the cache"
    )
    args = parser.parse_args()
    log_to_terminal()

    from opensora_sp.config import load_train_config
    from opensora_sp.features.precompute import precompute
    from opensora_sp.runtime import told_to_all_ranks

    with told_errors():
        with told_to_all_ranks():
            cfg = load_train_config(args.config, args.cfg_options)
        precompute(cfg, args.output)


if __name__ == "__main__":
    main()
