"""Train an STDiT model from a config: ``opensora-sp train`` as a script.

torchrun --nproc_per_node 8 scripts/train.py configs/stdit3/train/64x512x512_sp8.py
colossalai run --nproc_per_node 8 --hostfile hosts scripts/train.py CONFIG
"""

import sys

from opensora_sp.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
