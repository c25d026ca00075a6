"""Each Triton kernel against its reference in plain torch, for the widths of XL/2."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from opensora_sp.compile_cache import use_triton_cache
from opensora_sp.models.kernels.examples import Sizes, kernel_names
from opensora_sp.models.kernels.verification import obstacle, verify_kernel

from .measurements import Finding, Setup, largest_of

SIZES = Sizes(width=1152, heads=16, hidden=4608)


def check_kernel(name: str, setup: Setup) -> Iterator[Finding]:
    """The worst value or gradient of a kernel in each dtype, in multiples of rounding."""
    if setup.device.type != "cuda":
        yield Finding.skip(f"kernel {name}", "Triton compiles for GPUs")
        return
    if reason := obstacle(setup.device):
        yield Finding.skip(f"kernel {name}", reason)
        return

    use_triton_cache()
    # In bfloat16, which compares in float32, too.
    compared = verify_kernel(name, SIZES, torch.bfloat16, setup.device)
    differences = {difference.result: difference for difference in compared}
    for dtype in ("float32", "bfloat16"):
        in_float32 = dtype == "float32"
        ratios = {
            result: difference.error / difference.bound
            for result, difference in differences.items()
            if result.endswith(" in float32") == in_float32
        }
        worst, result = largest_of(ratios)
        label = f"kernel {name}, {dtype}"
        yield Finding(label, worst, 1.0, "x rounding", note=str(differences[result]))


KERNEL_CHECKS = {f"kernel {name}": partial(check_kernel, name) for name in kernel_names()}
