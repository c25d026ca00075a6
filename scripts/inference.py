"""Sample videos from a checkpoint, on any number of processes; see docs/sampling.md.

torchrun --nproc_per_node 3 scripts/inference.py CONFIG --ckpt RUN --prompts FILE
"""

from opensora_sp.console import exit_on_interrupt, log_to_terminal, report_errors
from opensora_sp.launchers import end_with_launchers


def main() -> None:
    end_with_launchers()
    exit_on_interrupt()
    log_to_terminal()

    from opensora_sp.runtime import raise_on_all_ranks
    from opensora_sp.sampling import parse, sample

    with report_errors():
        with raise_on_all_ranks():
            cfg = parse()
        sample(cfg)


if __name__ == "__main__":
    main()
