"""Encode the clips of a config into a feature cache: ``opensora-sp precompute`` as a script.

torchrun --nproc_per_node 8 scripts/precompute.py configs/stdit3/train/16x256x256_sp2.py -o cache/
"""

import sys

from opensora_sp.cli import main

if __name__ == "__main__":
    main(["precompute", *sys.argv[1:]])
