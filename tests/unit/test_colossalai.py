"""What the plugin uses of ColossalAI 0.5.0 beside its documented interface, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from opensora_sp.plugin import _colossalai as colossalai


def parameters(function: Callable) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_checkpoint_interface_has_the_methods_that_ours_has() -> None:
    from opensora_sp.plugin.checkpoint_io import NamedCheckpointIO

    for kind in ("model", "optimizer"):
        for verb in ("save", "load"):
            for form in ("sharded", "unsharded"):
                name = f"{verb}_{form}_{kind}"
                assert name in vars(NamedCheckpointIO), name
                theirs = parameters(getattr(colossalai.LowLevelZeroCheckpointIO, name))
                if verb == "load":
                    # Passed by position. Ours are the same function for a file and for an index.
                    theirs[1] = "checkpoint"
                ours = parameters(getattr(NamedCheckpointIO, name))
                named = [p for p in ours if p not in ("args", "kwargs")]
                assert named == theirs[: len(named)], name
    for name in ("save_lr_scheduler", "load_lr_scheduler", "save_lora_as_pretrained", "_sync_io"):
        assert name in vars(NamedCheckpointIO) and hasattr(
            colossalai.LowLevelZeroCheckpointIO, name
        ), name


def test_the_meta_kernels_are_those_of_torch() -> None:
    """The planner's trace needs the backward pass of a layer norm without an affine part."""
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    torch.nn.functional.layer_norm(x, (4,)).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
