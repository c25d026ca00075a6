"""Sample videos from a checkpoint, see docs/sampling.md: ``opensora-sp sample`` as a script.

torchrun --nproc_per_node 3 scripts/inference.py CONFIG --ckpt RUN --prompts FILE
"""

import sys

from opensora_sp.cli import main

if __name__ == "__main__":
    main(["sample", *sys.argv[1:]])
