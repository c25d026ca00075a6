"""ColossalAI's names that this package builds on, imported quietly.

ColossalAI 0.5.0 warns at import about extras that are absent (apex, tensornvme) and so do packages it imports; none
of these are needed here. Everything private of ColossalAI that the plugin relies on is imported here, so that a move
upstream shows up in one place.
"""

from __future__ import annotations

import logging
import warnings

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # complains of missing CPU kernels that nobody calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import colossalai
    from colossalai.accelerator import CpuAccelerator, get_accelerator, set_accelerator
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroCheckpointIO, LowLevelZeroModel
    from colossalai.interface import ModelWrapper, OptimizerWrapper
    from colossalai.interface.optimizer import DistributedOptim
    from colossalai.logging import get_dist_logger
    from colossalai.nn.optimizer import cast_to_distributed
    from colossalai.zero import LowLevelZeroOptimizer

__all__ = [
    "Booster",
    "CpuAccelerator",
    "DistributedOptim",
    "LowLevelZeroCheckpointIO",
    "LowLevelZeroModel",
    "LowLevelZeroOptimizer",
    "LowLevelZeroPlugin",
    "ModelWrapper",
    "OptimizerWrapper",
    "cast_to_distributed",
    "colossalai",
    "get_accelerator",
    "get_dist_logger",
    "set_accelerator",
]
