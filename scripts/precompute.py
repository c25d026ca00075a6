"""Encode the clips of a config once into a feature cache, to train from with CachedFeatures.

torchrun --nproc_per_node 8 scripts/precompute.py configs/stdit3/train/16x256x256_sp2.py -o cache/
"""

from opensora_sp.console import (
    config_arguments,
    exit_on_interrupt,
    log_to_terminal,
    report_errors,
)
from opensora_sp.launchers import end_with_launchers


def main() -> None:
    end_with_launchers()
    exit_on_interrupt()
    parser = config_arguments(
        "Make a feature cache. Start it with torchrun; started again, it resumes."
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="of the cache")
    args = parser.parse_args()
    log_to_terminal()

    from opensora_sp.config import load_train_config
    from opensora_sp.features.precompute import precompute
    from opensora_sp.runtime import raise_on_all_ranks

    with report_errors():
        with raise_on_all_ranks():
            cfg = load_train_config(args.config, args.cfg_options)
        precompute(cfg, args.output)


if __name__ == "__main__":
    main()
