"""ColossalAI's names that this package builds on, imported quietly.

ColossalAI 0.5.0 warns at import about extras that are absent (apex, tensornvme) and so do packages
it imports; none of these are needed here. Any other warning passes. Everything of ColossalAI that
the plugin relies on is imported here; ``check_colossalai`` refuses other versions.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from opensora_sp.common.importing import check_colossalai

check_colossalai()
# torchao, which peft imports, registers enums in a way of which torch warns.
pytree = logging.getLogger("torch.utils._pytree")
level = pytree.level
pytree.setLevel(logging.ERROR)
import peft  # noqa: E402, F401  it looks for bitsandbytes, and must not find the empty one

pytree.setLevel(level)

# Modules that ColossalAI imports for optimizers in 8 bits and of low rank, and the names it takes
# from them. No run has these optimizers, and bitsandbytes alone has 125 MB.
OPTIMIZERS = {
    "bitsandbytes": [],
    "bitsandbytes.optim": [],
    "bitsandbytes.optim.optimizer": ["Optimizer2State"],
    "galore_torch": ["GaLoreAdafactor", "GaLoreAdamW"],
}


@contextmanager
def without_optimizers() -> Iterator[None]:
    """Let imports find empty classes in the place of ``OPTIMIZERS``, installed or not."""
    absent = [module for module in OPTIMIZERS if module not in sys.modules]
    for module in absent:
        sys.modules[module] = ModuleType(module)
        for name in OPTIMIZERS[module]:
            setattr(sys.modules[module], name, type(name, (), {}))
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]


# ColossalAI and this package call them by the names that every torch has.
warnings.filterwarnings(
    "ignore",
    message=r"`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    category=FutureWarning,
)

with warnings.catch_warnings(), without_optimizers():
    warnings.filterwarnings(
        "ignore", message="Please install (the latest tensornvme|apex from source)"
    )
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
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
