"""ColossalAI's names that this package builds on, imported quietly.

ColossalAI 0.5.0 warns at import about extras that are absent (apex, tensornvme) and so do packages
it imports; none of these are needed here. Any other warning passes. Everything of ColossalAI that
the plugin relies on is imported here, and tests/unit/test_colossalai.py knows what is used of it,
so that a move upstream shows up in one place.
"""

from __future__ import annotations

import logging
import os
import warnings

_bitsandbytes = logging.getLogger("bitsandbytes")
_level = _bitsandbytes.level
_bitsandbytes.setLevel(logging.ERROR)  # complains of missing CPU kernels that nobody calls

# bitsandbytes, which ColossalAI imports, mentions torch.compile, and that import starts a pool of
# compiler processes in every rank. Without it the pool is started by whoever compiles first.
_pool = os.environ.get("TORCH_WARM_POOL")
os.environ.setdefault("TORCH_WARM_POOL", "0")

with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", message="Please install (the latest tensornvme|apex from source)"
    )
    import colossalai
    from colossalai._analyzer._subclasses import _meta_registration
    from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator
    from colossalai.amp.naive_amp.mixed_precision_mixin import MixedPrecisionMixin
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.booster.plugin.low_level_zero_plugin import (
        LowLevelZeroCheckpointIO,
        LowLevelZeroModel,
    )
    from colossalai.interface import ModelWrapper, OptimizerWrapper
    from colossalai.interface.optimizer import DistributedOptim
    from colossalai.logging import get_dist_logger
    from colossalai.nn.optimizer import cast_to_distributed
    from colossalai.utils import set_seed
    from colossalai.zero import LowLevelZeroOptimizer

# ColossalAI replaces kernels of meta tensors, for torch before 1.13. Under torch 2.13 the one of
# layer norm fails without an affine part, and the planner traces models on meta tensors.
if hasattr(_meta_registration.meta_lib, "_destroy"):
    _meta_registration.meta_lib._destroy()

_bitsandbytes.setLevel(_level)
if _pool is None:
    del os.environ["TORCH_WARM_POOL"]

__all__ = [
    "Booster",
    "CpuAccelerator",
    "DistributedOptim",
    "LowLevelZeroCheckpointIO",
    "LowLevelZeroModel",
    "LowLevelZeroOptimizer",
    "LowLevelZeroPlugin",
    "MixedPrecisionMixin",
    "ModelWrapper",
    "OptimizerWrapper",
    "cast_to_distributed",
    "colossalai",
    "get_accelerator",
    "get_dist_logger",
    "set_accelerator",
    "set_seed",
]
