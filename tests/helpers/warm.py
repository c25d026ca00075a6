"""Imported once by the process from which all ranks of all tests are forked (``ranks.run_ranks``).

A rank then starts in milliseconds with everything imported. What lives here is never garbage: the
collection at the end of each process group, a quarter of a second otherwise, passes over it.
"""

import gc
import importlib

PRELOADED = (
    "pytest",
    "mmengine.config",
    "torch.utils.tensorboard",
    "opensora_sp.models",
    "opensora_sp.parallel",
    "opensora_sp.plugin",
    "opensora_sp.training.run",
    "opensora_sp.sampling.run",
)

for name in PRELOADED:
    importlib.import_module(name)
gc.collect()
gc.freeze()
